//! How a model asks for routed experts and for rows of tables on disk. The engine implements these
//! traits over `expert-store`.

use crate::verbs::Backend;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// The host's copy of what [`Backend::route`] chose, in device order `[n, top_k]`.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    /// Expert index of each (row, choice).
    pub ids: Vec<u32>,
    /// Choices a row.
    pub top_k: usize,
    distinct: Vec<u32>,
}

impl Routes {
    /// Takes the ids of a layer and finds the distinct experts.
    pub fn set(&mut self, top_k: usize, write: impl FnOnce(&mut Vec<u32>)) {
        self.top_k = top_k;
        self.ids.clear();
        write(&mut self.ids);
        self.distinct.clear();
        self.distinct.extend_from_slice(&self.ids);
        self.distinct.sort_unstable();
        self.distinct.dedup();
    }

    /// The distinct experts, ascending.
    pub fn experts(&self) -> &[u32] {
        &self.distinct
    }

    /// Rows that chose `expert`, ascending.
    pub fn rows_of(&self, expert: u32) -> impl Iterator<Item = usize> {
        let rows = self.ids.chunks_exact(self.top_k.max(1)).enumerate();
        rows.filter(move |(_, ids)| ids.contains(&expert)).map(|(row, _)| row)
    }
}

/// Whoever keeps slots from eviction while pins of them live.
pub trait PinOwner: Send + Sync {
    /// Drops one pin of `slot`. A device's thread may call it at any time, under any lock.
    fn unpin(&self, slot: u32);
}

/// Memory that is never evicted.
impl PinOwner for () {
    fn unpin(&self, _: u32) {}
}

/// An expert whose bytes are in a slot, with the pin that keeps them there.
///
/// The pin cannot be taken out: whoever can name the slot also holds it, so evicting bytes in use
/// is impossible by type. A counted token and a slot number rather than an object of its own, since
/// a step may not allocate.
pub struct Ready {
    expert: u32,
    slot: u32,
    owner: Arc<dyn PinOwner>,
}

impl Ready {
    /// Takes over one pin of `slot`, which `owner` drops with it.
    pub fn new(expert: u32, slot: u32, owner: Arc<dyn PinOwner>) -> Self {
        Self { expert, slot, owner }
    }

    /// Expert index in its layer.
    pub fn expert(&self) -> u32 {
        self.expert
    }

    /// Slot index in the slab.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.owner.unpin(self.slot);
    }
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ready(expert {}, slot {})", self.expert, self.slot)
    }
}

/// Why a step, or some of its rows, failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The bytes of an expert could not be had.
    #[error("expert {expert} of layer {layer} could not be read")]
    Expert {
        /// Layer index.
        layer: u32,
        /// Expert index in its layer.
        expert: u32,
        /// The store's reason.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The store has failed as a whole.
    #[error("the expert store failed")]
    Store {
        /// The store's reason.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// A row of a table could not be had.
    #[error("row {row} of `{table}` could not be read")]
    Row {
        /// Name of the table.
        table: Arc<str>,
        /// Row index.
        row: u64,
        /// The store's reason.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The device went away; what was recorded is lost. Verbs report nothing, reads report this.
    #[error("the device was lost")]
    DeviceLost,
}

/// Rows of a step that cannot be finished, and the first reason. The other rows go on.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    failed: Vec<bool>,
    first: Option<StepError>,
}

impl Failures {
    /// Clears for a step of `n` rows.
    pub fn reset(&mut self, n: usize) {
        self.failed.clear();
        self.failed.resize(n, false);
        self.first = None;
    }

    /// Marks the rows that needed what `error` says is missing.
    pub fn mark(&mut self, rows: impl Iterator<Item = usize>, error: &StepError) {
        for row in rows {
            self.failed[row] = true;
        }
        self.first.get_or_insert_with(|| error.clone());
    }

    /// Whether this row failed.
    pub fn is_failed(&self, row: usize) -> bool {
        self.failed.get(row).copied().unwrap_or(false)
    }

    /// Whether every row failed, so that going on is pointless.
    pub fn all(&self) -> bool {
        self.first.is_some() && self.failed.iter().all(|&failed| failed)
    }

    /// The first failure of the step.
    pub fn first(&self) -> Option<&StepError> {
        self.first.as_ref()
    }
}

/// Source of experts.
pub trait ExpertFetch<B: Backend> {
    /// What [`Self::fetch`] returns.
    type Set: ExpertSet;

    /// The slab that slots belong to.
    fn slab(&self) -> &B::Slab;

    /// Most experts that one [`Self::fetch`] may name.
    fn wave_experts(&self) -> usize;

    /// Sets that may be under way at once, each of [`Self::wave_experts`]: 1, or 2 where the slots
    /// allow the next wave to be read while this one is computed.
    fn waves_ahead(&self) -> usize;

    /// Slot of expert 0 of a layer that was declared wholly resident *at open* (expert `e` lies in
    /// slot `first + e`): its routes need not be read.
    fn resident(&self, layer: u32) -> Option<u32>;

    /// Returns at once: hits pinned, reads submitted. A read that fails later is reported by the
    /// set, for its expert alone.
    ///
    /// # Errors
    /// When the store as a whole cannot go on.
    fn fetch(&mut self, layer: u32, experts: &[u32]) -> Result<Self::Set, StepError>;
}

/// Experts under way. Owns the pins of those not yet handed out; dropping it unpins them.
pub trait ExpertSet {
    /// Waits until at least one more expert has arrived or failed, then hands out all that have:
    /// arrived ones are pushed to `ready` in arrival order, failed ones go to `failed`.
    /// Returns false when all were handed out before.
    ///
    /// # Errors
    /// When the store as a whole cannot go on (it found itself stuck, say).
    fn next_ready(
        &mut self,
        ready: &mut Vec<Ready>,
        failed: &mut Vec<(u32, StepError)>,
    ) -> Result<bool, StepError>;
}

/// Source of rows of tables that never become resident, such as embeddings of n-grams: a step
/// needs few rows of them, and knows which from its tokens alone.
pub trait RowFetch: fmt::Debug {
    /// Begins to read rows of a table for this step, once a table and step; returns at once. A
    /// step that is not taken to its end leaves nothing behind.
    fn request(&mut self, table: usize, rows: &mut dyn Iterator<Item = u64>);

    /// Waits for what [`Self::request`] asked of this table: its rows in that order, f32,
    /// `[rows, width]`. A row that could not be read is NaN, and `failed` hears of it by its place
    /// in the request.
    fn wait(&mut self, table: usize, failed: &mut dyn FnMut(usize, &StepError)) -> &[f32];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_know_their_experts() {
        let mut routes = Routes::default();
        routes.set(2, |ids| ids.extend([4, 1, 1, 0, 4, 3]));
        assert_eq!(routes.experts(), [0, 1, 3, 4]);
        assert_eq!(routes.rows_of(4).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn failures_keep_the_first() {
        let mut failures = Failures::default();
        failures.reset(2);
        failures.mark([1].into_iter(), &StepError::DeviceLost);
        assert!(failures.is_failed(1) && !failures.is_failed(0) && !failures.all());
        let source = Arc::new(std::fmt::Error);
        failures.mark([0].into_iter(), &StepError::Store { source });
        assert!(failures.all());
        assert!(matches!(failures.first(), Some(StepError::DeviceLost)));
        failures.reset(2);
        assert!(failures.first().is_none() && !failures.is_failed(1));
    }
}
