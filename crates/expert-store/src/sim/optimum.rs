//! The best that any policy could do, knowing the future.

use super::{Hits, Trace};
use std::collections::BinaryHeap;

/// Not used again.
const NEVER: u32 = u32::MAX;

/// Evicts what is needed farthest in the future (Belady's MIN), for visits whose experts must all
/// be resident at once, as the store's must. Counts from step `from_step` on: a bound for every
/// policy where that is 0, and a close one otherwise.
///
/// # Panics
/// If a visit names more experts than there are slots.
pub fn optimum(trace: &Trace, slots: u32, from_step: u64) -> Hits {
    let record = |layer: u32, expert: u32| (layer * trace.n_experts() + expert) as usize;
    let records = (trace.n_layers() * trace.n_experts()) as usize;
    let next_uses = next_uses(trace);
    // By record, its next use if it is resident.
    let mut resident: Vec<Option<u32>> = vec![None; records];
    // Residents by their next use; an entry that `resident` contradicts is out of date.
    let mut farthest = BinaryHeap::new();
    let (mut count, mut held, mut at) = (Hits::default(), 0_u32, 0);
    for (step, layer, experts) in trace.visits() {
        assert!(experts.len() <= slots as usize, "`{}` experts, `{slots}` slots", experts.len());
        let uses = &next_uses[at..at + experts.len()];
        at += experts.len();
        for (&expert, &next_use) in experts.iter().zip(uses) {
            let hit = resident[record(layer, expert)].replace(next_use).is_some();
            held += u32::from(!hit);
            if step >= from_step {
                count.asked += 1;
                count.hits += u64::from(hit);
            }
        }
        // The visit's own experts are no victims: they go into the heap after it.
        while held > slots {
            let (next_use, record) = farthest.pop().expect("all other residents are in it");
            if resident[record] == Some(next_use) {
                resident[record] = None;
                held -= 1;
            }
        }
        farthest.extend(
            experts.iter().zip(uses).map(|(&expert, &next_use)| (next_use, record(layer, expert))),
        );
    }
    count
}

/// For each access, the visit at which its record is used next.
fn next_uses(trace: &Trace) -> Vec<u32> {
    let visits: Vec<_> = trace.visits().collect();
    let mut next = vec![NEVER; (trace.n_layers() * trace.n_experts()) as usize];
    let mut next_uses = vec![NEVER; trace.accesses()];
    let mut at = next_uses.len();
    for (visit, (_, layer, experts)) in visits.iter().enumerate().rev() {
        at -= experts.len();
        for (next_use, &expert) in next_uses[at..].iter_mut().zip(*experts) {
            let record = (layer * trace.n_experts() + expert) as usize;
            *next_use = next[record];
            next[record] = visit as u32;
        }
    }
    next_uses
}
