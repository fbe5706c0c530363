//! Speculative reads: what nobody has asked for yet.

use super::{NONE, Policy, Scope, SlotState, StrategyKind};
use crate::key::Key;
use crate::policy::strategy::log_add;

/// Candidates that a speculative read looks at before it gives up.
const TRIES: usize = 8;

impl Policy {
    /// Grants slots for speculative reads, as many as can be had; appends what is to be read. The
    /// slots are not pinned: a filling slot is nobody's victim.
    ///
    /// # Panics
    /// If a key does not exist.
    pub fn plan_idle(&mut self, keys: &[Key], out: &mut Vec<(Key, u32)>) {
        self.notice_released();
        for &key in keys {
            if self.find(key).is_some() {
                continue;
            }
            if self.options.idle_slots_max == 0 {
                return;
            }
            let full = self.idle.len() >= self.options.idle_slots_max as usize;
            let slot = match self.expired_resident() {
                Some(expired) => self.evict(expired),
                None if full => return,
                None => match self.take_empty().or_else(|| self.take_idle(key.layer)) {
                    Some(slot) => slot,
                    None => return,
                },
            };
            self.begin(slot, key);
            self.begin_idle(slot, key);
            out.push((key, slot));
        }
    }

    fn begin_idle(&mut self, slot: u32, key: Key) {
        self.clock += 1;
        let worth = match self.options.strategy {
            StrategyKind::Lru => self.clock as f64,
            StrategyKind::Mru => -(self.clock as f64),
            // As if it had been used once more, now; its count does not change.
            _ => log_add(self.heat[self.record(key)], self.now(key.layer)),
        };
        self.freshen(slot, key);
        let visits = self.layers[key.layer as usize].visits;
        let entry = &mut self.slots[slot as usize];
        (entry.worth, entry.used_step, entry.idle_since) = (worth, 0, Some(visits));
        self.idle.push(slot);
        self.stats.idle_records += 1;
    }

    /// Somebody asks for it, or it leaves; returns whether it was speculative until now.
    pub(super) fn claim(&mut self, slot: u32) -> bool {
        let was_idle = self.slots[slot as usize].idle_since.take().is_some();
        if was_idle {
            self.idle.retain(|&idle| idle != slot);
        }
        was_idle
    }

    /// A speculative record that came, whose layer went by without asking for it.
    pub(super) fn expired_resident(&self) -> Option<u32> {
        self.idle.iter().copied().find(|&slot| self.order.contains(slot) && self.has_expired(slot))
    }

    /// Speculative reads under way whose layer went by without asking for them; worth cancelling.
    pub(crate) fn expired_filling(&self) -> impl Iterator<Item = u32> {
        let filling = |&slot: &u32| matches!(self.state(slot), SlotState::Filling(_));
        self.idle.iter().copied().filter(filling).filter(|&slot| self.has_expired(slot))
    }

    /// All speculative reads under way.
    pub(crate) fn idle_filling(&self) -> impl Iterator<Item = u32> {
        let filling = |&slot: &u32| matches!(self.state(slot), SlotState::Filling(_));
        self.idle.iter().copied().filter(filling)
    }

    fn has_expired(&self, slot: u32) -> bool {
        let entry = &self.slots[slot as usize];
        let (SlotState::Filling(key) | SlotState::Resident(key)) = entry.state else {
            return false;
        };
        let Some(since) = entry.idle_since else { return false };
        let visits = self.layers[key.layer as usize].visits;
        visits > since + 1 || (visits > since && self.current != key.layer)
    }

    /// A victim that was not demanded in this step (invariant 5).
    fn take_idle(&mut self, layer: u32) -> Option<u32> {
        let entry = self.layers[layer as usize];
        let full = self.options.scope == Scope::PerLayer && entry.slots >= entry.share;
        let (mut aside, mut n_aside) = ([(NONE, NONE); TRIES], 0);
        let mut found = None;
        while n_aside < TRIES {
            let from = if full && self.order.top(layer).is_some() {
                layer
            } else {
                let Some(winner) = self.order.winner() else { break };
                winner
            };
            let top = self.order.top(from).expect("a winner has a slot");
            let slot = &self.slots[top as usize];
            if slot.used_step != self.step && slot.idle_since.is_none() {
                found = Some(self.evict(top));
                break;
            }
            self.order.remove(from, top);
            self.rank(from);
            aside[n_aside] = (from, top);
            n_aside += 1;
        }
        for &(from, slot) in &aside[..n_aside] {
            let SlotState::Resident(key) = self.state(slot) else { continue };
            self.order.insert(from, slot, self.worth(slot, key));
            self.rank(from);
        }
        found
    }
}
