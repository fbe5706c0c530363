//! Rows of tables that stay on disk: [`RowFetch`] over the store's cache of rows.

use crate::error::Result;
use crate::experts::{Io, open_source};
use crate::plan::{Plan, source_options};
use snowmelt_backend::{RowFetch, StepError};
use snowmelt_expert_store::{
    BlockSource, RowOptions, RowSpan, RowSpans, RowStats, RowStore, SourceOptions, StoreError,
};
use snowmelt_model::{Census, RowTable};
use snowmelt_weights::Checkpoint;
use std::sync::Arc;
use std::time::Duration;

/// Threads that read rows where `io_uring` is not allowed: reads are small, so that what counts is
/// how many are under way.
const THREADS: u32 = 4;
/// Reads of rows under way in `io_uring`.
const DEPTH: u32 = 32;
/// What the reader keeps of one read under way.
const READ_BYTES: usize = 256;

/// Options of the reader: a row is a block or two.
fn row_source_options() -> SourceOptions {
    SourceOptions { threads: THREADS, depth: DEPTH, bounces: DEPTH, ..source_options(true) }
}

/// Rows that a step of `rows` tokens may ask for, once each.
fn step_rows(census: &Census, rows: usize) -> u64 {
    let of_table = |table: &RowTable| ((rows * table.rows_a_token) as u64).min(table.rows());
    census.tables.iter().map(of_table).sum()
}

/// Bytes that a row takes in the cache, of the widest table.
fn bytes_a_row(census: &Census) -> u64 {
    let widest = census.tables.iter().map(RowTable::row_bytes).max().unwrap_or(0);
    RowStore::bytes_a_row(widest) as u64
}

/// Bytes of the cache: as asked for, but never less than a step needs, nor more than all rows take.
pub(crate) fn cache_bytes(census: &Census, rows: usize, wanted: u64) -> u64 {
    let all: u64 = census.tables.iter().map(RowTable::rows).sum();
    let each = bytes_a_row(census);
    let least = step_rows(census, rows) * each;
    wanted.min(all.saturating_mul(each)).max(least)
}

/// Bytes of everything else that rows of tables take: the reader's, and the rows of one step.
pub(crate) fn work_bytes(census: &Census, rows: usize, in_memory: bool) -> u64 {
    if census.tables.is_empty() {
        return 0;
    }
    let options = row_source_options();
    let bounces = options.pread_buffer_bytes().max(options.uring_buffer_bytes());
    let read = if in_memory { 0 } else { READ_BYTES * step_rows(census, rows) as usize + bounces };
    let widest = census.tables.iter().map(|table| table.rows_a_token * table.width * 4).max();
    let numbers: usize = census.tables.iter().map(|table| table.rows_a_token * 8).sum();
    (read + rows * (widest.unwrap_or(0) + numbers)) as u64
}

#[derive(Debug)]
struct Table {
    decl: RowTable,
    /// Row numbers asked for in this step.
    rows: Vec<u64>,
}

/// The tables of a model; none, for most.
#[derive(Debug)]
pub(crate) struct Tables {
    store: Option<RowStore>,
    list: Vec<Table>,
    /// One row as stored.
    stored: Vec<u8>,
    values: Vec<f32>,
}

impl Tables {
    /// Opens the files that tables lie in.
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        census: &Census,
        plan: &Plan,
        (io, read_timeout): (Io, Duration),
        source: Option<Box<dyn BlockSource + Send>>,
    ) -> Result<Self> {
        let table = |decl: &RowTable| Table {
            decl: decl.clone(),
            rows: Vec::with_capacity(plan.rows * decl.rows_a_token),
        };
        let list: Vec<Table> = census.tables.iter().map(table).collect();
        let bytes = census.tables.iter().map(RowTable::row_bytes).max().unwrap_or(0);
        let width = census.tables.iter().map(|table| table.rows_a_token * table.width).max();
        let mut opened = Self {
            store: None,
            list,
            stored: vec![0; bytes],
            values: vec![0.0; plan.rows * width.unwrap_or(0)],
        };
        if census.tables.is_empty() {
            return Ok(opened);
        }
        let source = match source {
            Some(source) => source,
            None => open_source(checkpoint, io, &row_source_options())?,
        };
        let rows = (plan.row_cache_bytes / bytes_a_row(census)) as usize;
        let options = RowOptions::new(rows, read_timeout);
        let spans = census.tables.iter().map(spans).collect();
        opened.store = Some(RowStore::open(spans, source, options)?);
        Ok(opened)
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self) {
        if let Some(store) = &mut self.store {
            store.begin();
        }
    }

    /// Counts since open; zero where there are no tables.
    pub(crate) fn stats(&self) -> RowStats {
        self.store.as_ref().map(RowStore::stats).unwrap_or_default()
    }

    /// The first failure, after which nothing more is read.
    pub(crate) fn failed(&self) -> Option<StoreError> {
        self.store.as_ref().and_then(|store| store.failed().cloned())
    }
}

fn spans(table: &RowTable) -> RowSpans {
    let span = |shard: &snowmelt_model::TableShard| RowSpan {
        file: shard.file,
        offset: shard.offset,
        rows: shard.rows,
    };
    let row_bytes = table.row_bytes() as u64;
    RowSpans { row_bytes, spans: table.shards.iter().map(span).collect() }
}

impl RowFetch for Tables {
    fn request(&mut self, table: usize, rows: &mut dyn Iterator<Item = u64>) {
        let store = self.store.as_mut().expect("opened with the tables of the census");
        let Table { rows: numbers, .. } = &mut self.list[table];
        numbers.clear();
        for row in rows {
            store.request(table as u32, row);
            numbers.push(row);
        }
    }

    fn wait(&mut self, table: usize, failed: &mut dyn FnMut(usize, &StepError)) -> &[f32] {
        let store = self.store.as_mut().expect("opened with the tables of the census");
        let Table { decl, rows } = &self.list[table];
        let stored = &mut self.stored[..decl.row_bytes()];
        let values = &mut self.values[..rows.len() * decl.width];
        for (place, (&row, values)) in
            rows.iter().zip(values.chunks_exact_mut(decl.width)).enumerate()
        {
            match store.read(table as u32, row, stored) {
                Ok(()) => decl.encoding.decode_row(stored, values),
                Err(error) => {
                    values.fill(f32::NAN);
                    let (table, source) = (Arc::clone(&decl.name), Arc::new(error));
                    failed(place, &StepError::Row { table, row, source });
                }
            }
        }
        values
    }
}
