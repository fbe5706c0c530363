//! Single rows of tables, read through a bounded cache.
//!
//! For tables of which a step needs few rows in random places: a row takes a block of the disk,
//! and only its own bytes of memory.

use crate::clock::{Clock, SystemClock};
use crate::error::StoreError;
use crate::memory::{HostMemory, Target};
use crate::source::{BLOCK, BlockSource, Completion, Priority, Read, ReadFailure};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Longest that a wait in the source lasts before time-outs are looked at.
const SLICE: Duration = Duration::from_millis(20);
/// No cell, in the index.
const NONE: u32 = u32::MAX;

/// Rows that lie one behind the other in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// Index of the file.
    pub file: u32,
    /// Where the first row begins.
    pub offset: u64,
    /// Rows.
    pub rows: u64,
}

/// Where the rows of a table lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpans {
    /// Bytes of a row.
    pub row_bytes: u64,
    /// All rows in order.
    pub spans: Vec<RowSpan>,
}

impl RowSpans {
    /// File and offset of a row.
    fn place(&self, row: u64) -> (u32, u64) {
        let mut first = 0;
        for span in &self.spans {
            if row - first < span.rows {
                return (span.file, span.offset + (row - first) * self.row_bytes);
            }
            first += span.rows;
        }
        panic!("row `{row}` of a table of `{first}`")
    }
}

/// Options of a [`RowStore`].
#[derive(Clone, Debug)]
pub struct RowOptions {
    /// Rows that the cache holds: at least those of one step, counted once each.
    pub rows: usize,
    /// How long nothing may come back before a read has failed.
    pub read_timeout: Duration,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

impl RowOptions {
    /// A cache of so many rows, with the machine's clock.
    pub fn new(rows: usize, read_timeout: Duration) -> Self {
        Self { rows, read_timeout, clock: Arc::new(SystemClock::default()) }
    }
}

/// What a [`RowStore`] did since it was opened. **Units** are in the names; others are counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowStats {
    /// Rows asked for, however often.
    pub asked: u64,
    /// Those of them that were in the cache, or under way.
    pub hits: u64,
    /// Rows read.
    pub reads: u64,
    /// Bytes of the blocks that they lie in.
    pub bytes: u64,
    /// Time that callers waited for rows.
    pub wait_ns: u64,
    /// Rows that failed.
    pub failures: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    /// Being read, for so many bytes already.
    Filling {
        since: Duration,
        done: u32,
    },
    /// Given up; the source may still write to it.
    Late,
    Full,
}

/// One cached row.
#[derive(Clone, Copy, Debug)]
struct Cell {
    row: u64,
    /// The step that asked for it last.
    step: u64,
    state: State,
    table: u32,
    /// Asked for since the hand went by.
    is_used: bool,
}

/// Brings rows into a cache of fixed size.
///
/// Invariants:
/// 1. A cell that is being read, or was given up, is nobody's victim until the source has given
///    its read back.
/// 2. The rows of a step stay until the next [`Self::begin`].
/// 3. After the first failure nothing more is read; rows in the cache are still served.
#[derive(Debug)]
pub struct RowStore {
    // Before `memory`: its drop waits for reads into it.
    source: Box<dyn BlockSource + Send>,
    memory: Arc<HostMemory>,
    tables: Vec<RowSpans>,
    cells: Vec<Cell>,
    /// Cells by the hash of their row, with linear probing; a power of two of them.
    index: Vec<u32>,
    cell_bytes: usize,
    hand: usize,
    step: u64,
    filling: usize,
    /// When a read came back last.
    moved: Duration,
    /// The first failure, and whose it was.
    latched: Option<(Arc<StoreError>, u32, u64)>,
    options: RowOptions,
    stats: RowStats,
}

impl RowStore {
    /// Memory that a cached row of so many bytes takes, its place in the index included.
    pub const fn bytes_a_row(row_bytes: usize) -> usize {
        row_bytes + size_of::<Cell>() + 4 * size_of::<u32>()
    }

    /// An empty cache over these tables.
    ///
    /// # Errors
    /// [`StoreError::Setup`] if the memory cannot be had.
    pub fn open(
        tables: Vec<RowSpans>,
        mut source: Box<dyn BlockSource + Send>,
        options: RowOptions,
    ) -> Result<Self, StoreError> {
        let cell_bytes = tables.iter().map(|table| table.row_bytes as usize).max().unwrap_or(1);
        let rows = options.rows.max(1);
        source.reserve(rows.min(1 << 12));
        let (row, step, table) = (0, 0, 0);
        let cell = Cell { row, step, state: State::Empty, table, is_used: false };
        Ok(Self {
            source,
            memory: Arc::new(HostMemory::new(rows * cell_bytes, 1)?),
            tables,
            cells: vec![cell; rows],
            index: vec![NONE; (2 * rows).next_power_of_two()],
            cell_bytes,
            hand: 0,
            step: 1,
            filling: 0,
            moved: Duration::ZERO,
            latched: None,
            options,
            stats: RowStats::default(),
        })
    }

    /// Counts since open.
    pub fn stats(&self) -> RowStats {
        self.stats
    }

    /// What rows are read with.
    pub fn source_name(&self) -> &'static str {
        self.source.name()
    }

    /// The first failure, after which nothing more is read.
    pub fn failed(&self) -> Option<&StoreError> {
        self.latched.as_ref().map(|(error, ..)| &**error)
    }

    /// Begins a step: rows of earlier ones may go.
    pub fn begin(&mut self) {
        self.step += 1;
    }

    /// Begins to read a row, unless it is there or under way.
    ///
    /// # Panics
    /// Past the end of the table, or past the rows that one step may ask for.
    pub fn request(&mut self, table: u32, row: u64) {
        self.poll(None);
        self.stats.asked += 1;
        if let Some(at) = self.find(table, row) {
            self.stats.hits += 1;
            let cell = &mut self.cells[self.index[at] as usize];
            (cell.step, cell.is_used) = (self.step, true);
            return;
        }
        if self.latched.is_some() {
            return;
        }
        let (file, offset) = self.tables[table as usize].place(row);
        let row_bytes = self.tables[table as usize].row_bytes;
        let Some(cell) = self.claim() else { return };
        let since = self.options.clock.now();
        let state = State::Filling { since, done: 0 };
        self.cells[cell] = Cell { row, step: self.step, state, table, is_used: true };
        self.insert(cell);
        self.filling += 1;
        self.stats.reads += 1;
        let end = (offset + row_bytes).next_multiple_of(BLOCK);
        self.stats.bytes += end - offset / BLOCK * BLOCK;
        self.submit(cell, file, offset, row_bytes, 0);
    }

    fn submit(&mut self, cell: usize, file: u32, offset: u64, len: u64, done: u64) {
        let memory = Arc::clone(&self.memory) as Arc<dyn crate::memory::SlotMemory>;
        let start = cell * self.cell_bytes + done as usize;
        let target = Target::new(memory, 0, start, len as usize);
        let (id, priority) = (cell as u64, Priority::Demand);
        self.source.submit(Read { id, file, offset, len, target, priority });
    }

    /// Copies a row that this step asked for, once it is there.
    ///
    /// # Errors
    /// The failure of its read, or [`StoreError::Latched`] with an earlier one of another row.
    pub fn read(&mut self, table: u32, row: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let mut began = None;
        let cell = loop {
            let found = self.find(table, row).map(|at| self.index[at] as usize);
            let state = found.map_or(State::Empty, |cell| self.cells[cell].state);
            match (found, state) {
                (Some(cell), State::Full) => break Ok(cell),
                (Some(cell), State::Filling { since, .. }) => {
                    began.get_or_insert_with(|| self.options.clock.now());
                    self.poll(Some(SLICE));
                    self.check_timeout(cell, since);
                }
                _ => break Err(self.error_of(table, row)),
            }
        };
        if let Some(began) = began {
            let waited = self.options.clock.now().saturating_sub(began);
            self.stats.wait_ns += waited.as_nanos() as u64;
        }
        self.memory.copy_out(0, cell? * self.cell_bytes, into);
        Ok(())
    }

    fn error_of(&self, table: u32, row: u64) -> StoreError {
        let (error, of_table, of_row) =
            self.latched.as_ref().expect("a row asked for is there, or something failed");
        match (*of_table, *of_row) == (table, row) {
            true => (**error).clone(),
            false => StoreError::Latched { first: Arc::clone(error) },
        }
    }

    /// A cell to read into; waits for reads of an earlier step where only they can make room.
    fn claim(&mut self) -> Option<usize> {
        loop {
            for _ in 0..2 * self.cells.len() {
                let at = self.hand;
                self.hand = (at + 1) % self.cells.len();
                let cell = &mut self.cells[at];
                match cell.state {
                    State::Empty => return Some(at),
                    State::Full if cell.step != self.step => {
                        if std::mem::take(&mut cell.is_used) {
                            continue;
                        }
                        let (table, row) = (cell.table, cell.row);
                        cell.state = State::Empty;
                        let place = self.find(table, row).expect("a full cell is in the index");
                        self.remove(place);
                        return Some(at);
                    }
                    _ => {}
                }
            }
            assert!(self.filling > 0, "a step asks for more rows than the cache was made for");
            let waits = self.cells.iter().position(|cell| {
                matches!(cell.state, State::Filling { .. }) && cell.step != self.step
            })?;
            let State::Filling { since, .. } = self.cells[waits].state else { return None };
            self.poll(Some(SLICE));
            self.check_timeout(waits, since);
            if self.latched.is_some() {
                return None;
            }
        }
    }

    /// Takes what has come back; with `wait`, waits for one.
    fn poll(&mut self, wait: Option<Duration>) {
        let mut wait = wait;
        while self.filling > 0 {
            let Some(completion) = self.source.poll(wait.take()) else { return };
            self.complete(completion);
        }
    }

    fn complete(&mut self, completion: Completion) {
        self.moved = self.options.clock.now();
        let at = completion.id as usize;
        let Cell { state, table, row, .. } = self.cells[at];
        let spans = &self.tables[table as usize];
        let (row_bytes, (file, start)) = (spans.row_bytes, spans.place(row));
        let State::Filling { done, since } = state else {
            // It was given up, and is free again now.
            self.filling -= 1;
            self.cells[at].state = State::Empty;
            return;
        };
        let (offset, wanted) = (start + u64::from(done), row_bytes - u64::from(done));
        match completion.result {
            Ok(got) if got >= wanted => {
                self.filling -= 1;
                self.cells[at].state = State::Full;
            }
            Ok(got) if got > 0 => {
                let done = u64::from(done) + got;
                self.cells[at].state = State::Filling { since, done: done as u32 };
                self.submit(at, file, start + done, row_bytes - done, done);
            }
            result => {
                self.filling -= 1;
                let ended = ReadFailure { file, offset, wanted, got: 0, errno: None };
                let failure = result.err().unwrap_or(ended);
                let path = Arc::clone(self.source.path(failure.file));
                self.forget(at, State::Empty, failed(path, &failure));
            }
        }
    }

    fn check_timeout(&mut self, at: usize, since: Duration) {
        let (now, timeout) = (self.options.clock.now(), self.options.read_timeout);
        let is_filling = matches!(self.cells[at].state, State::Filling { .. });
        if !is_filling || now.saturating_sub(since.max(self.moved)) < timeout {
            return;
        }
        let Cell { table, row, .. } = self.cells[at];
        let spans = &self.tables[table as usize];
        let (file, offset) = spans.place(row);
        let path = Arc::clone(self.source.path(file));
        let (wanted, waited_ms) = (spans.row_bytes, timeout.as_millis() as u64);
        let error = StoreError::RowTimedOut { path, offset, wanted, waited_ms };
        self.forget(at, State::Late, error);
    }

    /// The row of a cell has failed, and with the first such one the store.
    fn forget(&mut self, at: usize, state: State, error: StoreError) {
        let Cell { table, row, .. } = self.cells[at];
        let place = self.find(table, row).expect("a cell under way is in the index");
        self.remove(place);
        self.cells[at].state = state;
        self.stats.failures += 1;
        self.latched.get_or_insert((Arc::new(error), table, row));
    }

    // The index.

    fn home(&self, table: u32, row: u64) -> usize {
        let key = row ^ u64::from(table).rotate_left(48);
        let hash = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (hash >> 32) as usize & (self.index.len() - 1)
    }

    /// Place of a row in the index.
    fn find(&self, table: u32, row: u64) -> Option<usize> {
        let mut at = self.home(table, row);
        while self.index[at] != NONE {
            let cell = &self.cells[self.index[at] as usize];
            if (cell.table, cell.row) == (table, row) {
                return Some(at);
            }
            at = (at + 1) & (self.index.len() - 1);
        }
        None
    }

    fn insert(&mut self, cell: usize) {
        let mut at = self.home(self.cells[cell].table, self.cells[cell].row);
        while self.index[at] != NONE {
            at = (at + 1) & (self.index.len() - 1);
        }
        self.index[at] = cell as u32;
    }

    /// Empties a place and moves those behind it up, so that each is still found from its home.
    fn remove(&mut self, place: usize) {
        let mask = self.index.len() - 1;
        let (mut hole, mut at) = (place, place);
        loop {
            at = (at + 1) & mask;
            let Some(cell) = self.cells.get(self.index[at] as usize) else { break };
            let home = self.home(cell.table, cell.row);
            // Whether the hole lies on the way from its home to where it is.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.index[hole] = self.index[at];
                hole = at;
            }
        }
        self.index[hole] = NONE;
    }
}

fn failed(path: Arc<Path>, failure: &ReadFailure) -> StoreError {
    let &ReadFailure { offset, wanted, got, errno, .. } = failure;
    match errno {
        None if got < wanted => StoreError::RowTruncated { path, offset, wanted, got },
        errno => StoreError::RowRead { path, offset, wanted, got, errno },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::source::{Fault, FaultKind, FaultSource, FaultWhen, MemorySource};
    use std::collections::HashMap;

    /// Two tables in one blob: rows of 24 bytes in two spans, and rows of 40.
    fn tables() -> Vec<RowSpans> {
        let span = |offset, rows| RowSpan { file: 0, offset, rows };
        vec![
            RowSpans { row_bytes: 24, spans: vec![span(9000, 50), span(10, 70)] },
            RowSpans { row_bytes: 40, spans: vec![span(20_001, 90)] },
        ]
    }

    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9E37_79B9) >> 7) as u8
    }

    fn expected(table: &RowSpans, row: u64) -> Vec<u8> {
        let (_, offset) = table.place(row);
        (offset..offset + table.row_bytes).map(byte).collect()
    }

    fn store(rows: usize, script: &[Fault]) -> RowStore {
        let blob: Arc<[u8]> = (0..30_000).map(byte).collect();
        let source = FaultSource::new(MemorySource::new([blob]));
        let source = Box::new(source.with_script(script.iter().copied()));
        let options = RowOptions::new(rows, Duration::from_millis(200));
        RowStore::open(tables(), source, options).expect("opens")
    }

    #[test]
    fn rows_are_right_whatever_was_before() {
        let mut store = store(12, &[]);
        let (tables, mut rng) = (tables(), Rng::new(7));
        let mut asked = 0;
        for _ in 0..2000 {
            store.begin();
            let draw = |rng: &mut Rng| {
                let table = rng.below(2);
                (table as u32, rng.below([120, 90][table as usize]))
            };
            let wanted: Vec<(u32, u64)> = (0..rng.below(13)).map(|_| draw(&mut rng)).collect();
            for &(table, row) in &wanted {
                store.request(table, row);
                asked += 1;
            }
            // A step may end before its rows are taken.
            let taken = rng.below(wanted.len() as u64 + 1) as usize;
            for &(table, row) in &wanted[..taken] {
                let mut bytes = vec![0; tables[table as usize].row_bytes as usize];
                store.read(table, row, &mut bytes).expect("no faults");
                assert_eq!(bytes, expected(&tables[table as usize], row), "{table} {row}");
            }
            let places: HashMap<(u32, u64), usize> = store
                .cells
                .iter()
                .enumerate()
                .filter(|(_, cell)| cell.state != State::Empty)
                .map(|(at, cell)| ((cell.table, cell.row), at))
                .collect();
            for (&(table, row), &cell) in &places {
                let found = store.find(table, row).map(|at| store.index[at] as usize);
                assert_eq!(found, Some(cell), "the index has every cell");
            }
            let held = store.index.iter().filter(|&&cell| cell != NONE).count();
            assert_eq!(held, places.len(), "and no more");
        }
        let stats = store.stats();
        assert_eq!((stats.asked, stats.hits + stats.reads), (asked, asked));
        assert!(stats.hits > 0 && stats.bytes >= stats.reads * BLOCK, "{stats:?}");
    }

    #[test]
    fn a_failed_read_says_where_and_latches() {
        let kinds = [
            (FaultKind::Errno(5), "nput/output error"),
            (FaultKind::Truncated, "ended"),
            (FaultKind::Stall { polls: u64::MAX }, "not back after"),
        ];
        for (kind, word) in kinds {
            let mut store = store(8, &[Fault { when: FaultWhen::Nth(1), kind, times: 1 }]);
            store.begin();
            for row in 0..3 {
                store.request(0, row);
            }
            let mut bytes = [0; 24];
            store.read(0, 0, &mut bytes).expect("not this one");
            let error = store.read(0, 1, &mut bytes).expect_err("this one").to_string();
            assert!(error.contains("memory:0") && error.contains("9024"), "{error}");
            assert!(error.contains(word), "{error}");
            if store.read(0, 2, &mut bytes).is_ok() {
                assert_eq!(bytes[..], expected(&tables()[0], 2), "{kind:?}");
            }
            store.begin();
            store.request(0, 0);
            store.request(1, 5);
            store.read(0, 0, &mut bytes).expect("it is in the cache");
            let error = store.read(1, 5, &mut [0; 40]).expect_err("nothing more is read");
            assert!(matches!(error, StoreError::Latched { .. }), "{error}");
            assert!(store.failed().is_some());
        }
    }

    #[test]
    fn short_reads_are_continued() {
        let kind = FaultKind::ShortRead { got: 7 };
        let mut store = store(8, &[Fault { when: FaultWhen::Always, kind, times: 3 }]);
        store.begin();
        store.request(1, 89);
        let mut bytes = [0; 40];
        store.read(1, 89, &mut bytes).expect("no failure");
        assert_eq!(bytes[..], expected(&tables()[1], 89));
    }
}
