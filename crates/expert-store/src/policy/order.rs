//! The order in which slots are given up: a heap for each layer, and a tournament between layers.

/// Not in any heap.
pub(crate) const OUT: u32 = u32::MAX;

/// What a layer stands for in the tournament: the least wins.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct Rank {
    /// First of all.
    pub(crate) class: u8,
    /// Then: the worth of the layer's least worthy slot.
    pub(crate) worth: f64,
}

const NOBODY: Rank = Rank { class: u8::MAX, worth: f64::INFINITY };

/// Slots that could be given up, the least worthy first. Each operation is O(log n).
///
/// Invariants: 1. `place[slot]` is where the slot is in its layer's heap, or [`OUT`]; 2. no slot
/// of a heap is worth less than its parent; 3. each inner node of the tournament names the child's
/// layer of lower rank, the left one if equal.
#[derive(Debug)]
pub(crate) struct Order {
    heaps: Vec<Vec<u32>>,
    place: Vec<u32>,
    worth: Vec<f64>,
    ranks: Vec<Rank>,
    /// `tree[1]` is the winner; the leaf of layer `l` is `tree[width + l]`.
    tree: Vec<u32>,
    width: usize,
}

impl Order {
    /// `most[layer]`: slots that a layer can hold.
    pub(crate) fn new(slots: u32, most: impl Iterator<Item = u32>) -> Self {
        let heaps: Vec<Vec<u32>> = most.map(|n| Vec::with_capacity(n as usize)).collect();
        let width = heaps.len().next_power_of_two().max(2);
        let mut tree = vec![0; 2 * width];
        for leaf in 0..width {
            tree[width + leaf] = leaf as u32;
        }
        for node in (1..width).rev() {
            tree[node] = tree[2 * node];
        }
        Self {
            heaps,
            place: vec![OUT; slots as usize],
            worth: vec![0.0; slots as usize],
            ranks: vec![NOBODY; width],
            tree,
            width,
        }
    }

    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.place[slot as usize] != OUT
    }

    /// The layer's least worthy slot.
    pub(crate) fn top(&self, layer: u32) -> Option<u32> {
        self.heaps[layer as usize].first().copied()
    }

    pub(crate) fn worth(&self, slot: u32) -> f64 {
        self.worth[slot as usize]
    }

    /// The layer that should give up a slot, if any has one to give.
    pub(crate) fn winner(&self) -> Option<u32> {
        let layer = self.tree[1];
        (self.ranks[layer as usize].class != NOBODY.class).then_some(layer)
    }

    pub(crate) fn insert(&mut self, layer: u32, slot: u32, worth: f64) {
        assert!(!self.contains(slot), "slot `{slot}` is in the order already");
        self.worth[slot as usize] = worth;
        let heap = &mut self.heaps[layer as usize];
        heap.push(slot);
        let at = heap.len() - 1;
        self.place[slot as usize] = at as u32;
        self.up(layer, at);
    }

    pub(crate) fn remove(&mut self, layer: u32, slot: u32) {
        let at = self.place[slot as usize] as usize;
        let heap = &mut self.heaps[layer as usize];
        assert!(heap.get(at) == Some(&slot), "slot `{slot}` is not in the order");
        heap.swap_remove(at);
        self.place[slot as usize] = OUT;
        if at < heap.len() {
            self.place[heap[at] as usize] = at as u32;
            self.down(layer, at);
            self.up(layer, at);
        }
    }

    fn up(&mut self, layer: u32, mut at: usize) {
        let heap = &mut self.heaps[layer as usize];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.worth[heap[parent] as usize] <= self.worth[heap[at] as usize] {
                break;
            }
            heap.swap(at, parent);
            self.place[heap[at] as usize] = at as u32;
            self.place[heap[parent] as usize] = parent as u32;
            at = parent;
        }
    }

    fn down(&mut self, layer: u32, mut at: usize) {
        let heap = &mut self.heaps[layer as usize];
        let worth = |heap: &[u32], at: usize| self.worth[heap[at] as usize];
        loop {
            let mut least = at;
            for child in [2 * at + 1, 2 * at + 2] {
                if child < heap.len() && worth(heap, child) < worth(heap, least) {
                    least = child;
                }
            }
            if least == at {
                break;
            }
            heap.swap(at, least);
            self.place[heap[at] as usize] = at as u32;
            self.place[heap[least] as usize] = least as u32;
            at = least;
        }
    }

    /// Tells the tournament what the layer's top is worth now; `None` if the layer has none.
    pub(crate) fn rank(&mut self, layer: u32, rank: Option<Rank>) {
        let rank = rank.unwrap_or(NOBODY);
        assert!(!rank.worth.is_nan(), "layer `{layer}` ranks as not a number");
        self.ranks[layer as usize] = rank;
        let leaf = self.width + layer as usize;
        let mut node = leaf / 2;
        while node > 0 {
            let (left, right) = (self.tree[2 * node], self.tree[2 * node + 1]);
            let right_wins = self.ranks[right as usize] < self.ranks[left as usize];
            self.tree[node] = if right_wins { right } else { left };
            node /= 2;
        }
    }

    /// Panics if an invariant does not hold. O(n), for tests.
    pub(crate) fn check(&self) {
        for heap in &self.heaps {
            for (at, &slot) in heap.iter().enumerate() {
                assert_eq!(self.place[slot as usize] as usize, at, "invariant 1");
                let parent = heap[at.saturating_sub(1) / 2];
                assert!(self.worth[parent as usize] <= self.worth[slot as usize], "invariant 2");
            }
        }
        let held: usize = self.heaps.iter().map(Vec::len).sum();
        let placed = self.place.iter().filter(|&&place| place != OUT).count();
        assert_eq!(held, placed, "invariant 1");
        for node in 1..self.width {
            let (left, right) = (self.tree[2 * node], self.tree[2 * node + 1]);
            let right_wins = self.ranks[right as usize] < self.ranks[left as usize];
            assert_eq!(self.tree[node], if right_wins { right } else { left }, "invariant 3");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn gives_up_the_least_worthy() {
        let (slots, layers) = (60_u32, 5_u32);
        let mut order = Order::new(slots, (0..layers).map(|_| slots));
        let mut rng = Rng::new(1);
        let mut held: Vec<(f64, u32, u32)> = Vec::new();
        for _ in 0..5000 {
            let slot = rng.below(slots.into()) as u32;
            let layer = if let Some(at) = held.iter().position(|h| h.2 == slot) {
                let (_, layer, _) = held.swap_remove(at);
                order.remove(layer, slot);
                layer
            } else {
                let (worth, layer) = (rng.unit(), rng.below(layers.into()) as u32);
                order.insert(layer, slot, worth);
                held.push((worth, layer, slot));
                layer
            };
            let top = order.top(layer);
            order.rank(layer, top.map(|top| Rank { class: 1, worth: order.worth(top) }));
            order.check();
            let least = held.iter().min_by(|a, b| a.0.total_cmp(&b.0));
            let won = order.winner().map(|layer| order.top(layer).expect("a winner has a slot"));
            assert_eq!(won, least.map(|h| h.2));
        }
    }
}
