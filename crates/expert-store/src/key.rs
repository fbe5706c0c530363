//! What is read: keys and the byte ranges behind them.

use std::fmt;
use std::path::PathBuf;

/// One expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Layer index.
    pub layer: u32,
    /// Expert index in its layer.
    pub expert: u32,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer `{}` expert `{}`", self.layer, self.expert)
    }
}

/// One contiguous piece of a record. **Units**: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the file among those the source was opened with.
    pub file: u32,
    /// Where the piece begins in the file.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// Where it goes in the slot.
    pub slot_offset: u64,
}

/// A file to read from, by its index in the list a source is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// Where it is.
    pub path: PathBuf,
    /// Its length in bytes when the byte ranges were made; another length is refused at open.
    pub len: u64,
}

/// Where the records lie. Fixed for the life of a store.
pub trait RecordMap: Send + Sync {
    /// Layer count.
    fn n_layers(&self) -> u32;
    /// Experts of a layer; 0 for a layer without experts.
    fn n_experts(&self, layer: u32) -> u32;
    /// The pieces of a record, which must not overlap in the slot. Called for valid keys only.
    fn extents(&self, key: Key) -> &[Extent];
    /// Bytes of a record: the sum of its pieces.
    fn record_bytes(&self, key: Key) -> u64 {
        self.extents(key).iter().map(|extent| extent.len).sum()
    }
}

/// A [`RecordMap`] held in two flat tables.
#[derive(Clone, Debug)]
pub struct RecordTable {
    /// First record of each layer, and one past the last.
    layers: Vec<u32>,
    /// First extent of each record, and one past the last.
    records: Vec<u32>,
    extents: Vec<Extent>,
}

impl RecordTable {
    /// `n_layers` layers of `n_experts` each.
    pub fn from_fn(n_layers: u32, n_experts: u32, extents: impl FnMut(Key) -> Vec<Extent>) -> Self {
        Self::from_layers(&vec![n_experts; n_layers as usize], extents)
    }

    /// Layers of different size: `n_experts[layer]`.
    pub fn from_layers(n_experts: &[u32], mut extents: impl FnMut(Key) -> Vec<Extent>) -> Self {
        let mut table = Self { layers: vec![0], records: vec![0], extents: Vec::new() };
        for (layer, &n) in n_experts.iter().enumerate() {
            for expert in 0..n {
                table.extents.extend(extents(Key { layer: layer as u32, expert }));
                table.records.push(table.extents.len() as u32);
            }
            table.layers.push(table.records.len() as u32 - 1);
        }
        table
    }
}

impl RecordMap for RecordTable {
    fn n_layers(&self) -> u32 {
        self.layers.len() as u32 - 1
    }
    fn n_experts(&self, layer: u32) -> u32 {
        self.layers[layer as usize + 1] - self.layers[layer as usize]
    }
    fn extents(&self, key: Key) -> &[Extent] {
        let record = (self.layers[key.layer as usize] + key.expert) as usize;
        &self.extents[self.records[record] as usize..self.records[record + 1] as usize]
    }
}
