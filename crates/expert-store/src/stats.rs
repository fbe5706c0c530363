//! Counts.

/// What a store did since it was opened. **Units** are in the names; others are counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Keys asked for that were resident.
    pub hits: u64,
    /// Keys asked for that had to be read.
    pub misses: u64,
    /// Keys asked for whose read was under way already, demanded by someone else.
    pub joins: u64,
    /// Speculative reads that a demand joined while they were under way.
    pub adopted: u64,
    /// Hits (counted there too) on records that a speculative read had brought.
    pub idle_hits: u64,
    /// Speculative records that left, or were cancelled, before anyone asked for them.
    pub wasted: u64,
    /// Records that a speculative read was begun for.
    pub idle_records: u64,
    /// Records evicted.
    pub evictions: u64,
    /// Times that a key found no slot to take.
    pub waits: u64,
    /// Bytes read because they were asked for, adopted reads included.
    pub demand_bytes: u64,
    /// Bytes read speculatively.
    pub idle_bytes: u64,
    /// Reads given to the source (pieces of records; the rest after a short read counts again).
    pub reads: u64,
    /// Sum over records of the time from request to arrival.
    pub read_ns: u64,
    /// Time that callers of `take_ready` waited.
    pub wait_ns: u64,
    /// Records that failed.
    pub failures: u64,
}

impl Stats {
    /// Share of the keys asked for that needed no wait; 0 if none was asked for.
    pub fn hit_rate(&self) -> f64 {
        let asked = self.hits + self.misses + self.joins + self.adopted;
        if asked == 0 { 0.0 } else { self.hits as f64 / asked as f64 }
    }
}

/// Counts of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// Keys asked for that were resident.
    pub hits: u64,
    /// Keys asked for that were not.
    pub misses: u64,
    /// Slots that hold a record of the layer or are being filled with one.
    pub slots: u32,
}
