//! Tables that stay on disk, of which a token reads single rows.

use crate::config::Result;
use crate::error::ModelError;
use crate::loader::Tensors;
use snowmelt_weights::Encoding;
use std::sync::Arc;

/// A table whose rows are read one by one: `[rows, width]`, in shards of rows.
#[derive(Clone, Debug)]
pub struct RowTable {
    /// Name without the shards.
    pub name: Arc<str>,
    /// Encoding of its rows.
    pub encoding: Encoding,
    /// Values in a row.
    pub width: usize,
    /// Rows that a token reads.
    pub rows_a_token: usize,
    /// Its rows in order.
    pub shards: Vec<TableShard>,
}

/// Rows of a table that lie one behind the other in a file.
#[derive(Clone, Debug)]
pub struct TableShard {
    /// Name in the checkpoint.
    pub name: String,
    /// Index into [`snowmelt_weights::Checkpoint::files`].
    pub file: u32,
    /// Byte offset of its first row in the file.
    pub offset: u64,
    /// Rows.
    pub rows: u64,
}

impl RowTable {
    /// Rows of all shards.
    pub fn rows(&self) -> u64 {
        self.shards.iter().map(|shard| shard.rows).sum()
    }

    /// Bytes of one row as stored.
    pub fn row_bytes(&self) -> usize {
        self.encoding.row_bytes(self.width)
    }

    /// Bytes of the table as stored.
    pub fn bytes(&self) -> u64 {
        self.rows() * self.row_bytes() as u64
    }
}

/// What a family says of a table.
#[derive(Clone, Debug)]
pub struct TableShape {
    /// Name, to which `.shard_{s}.weight` is added.
    pub name: String,
    /// Equal shards; they divide the rows.
    pub parts: usize,
    /// Rows in all.
    pub rows: usize,
    /// Values in a row.
    pub width: usize,
    /// Rows that a token reads.
    pub rows_a_token: usize,
}

/// Finds the shards of a table.
pub(crate) fn locate(tensors: &mut Tensors<'_>, shape: &TableShape) -> Result<RowTable> {
    let &TableShape { parts, rows, width, rows_a_token, .. } = shape;
    assert!(rows.is_multiple_of(parts), "{rows} rows in {parts} shards");
    let mut shards: Vec<TableShard> = Vec::new();
    let mut stored = None;
    for part in 0..parts {
        let name = format!("{}.shard_{part}.weight", shape.name);
        let (info, encoding) = tensors.require(&name, &[rows / parts, width])?;
        let expected = *stored.get_or_insert(encoding);
        if encoding != expected {
            let (found, expected) = (encoding.to_string(), expected.to_string());
            return Err(ModelError::MixedTable { tensor: name, found, expected });
        }
        let (file, offset) = (info.file, info.offset);
        shards.push(TableShard { name, file, offset, rows: (rows / parts) as u64 });
    }
    let encoding = stored.expect("there is a shard");
    Ok(RowTable { name: shape.name.as_str().into(), encoding, width, rows_a_token, shards })
}
