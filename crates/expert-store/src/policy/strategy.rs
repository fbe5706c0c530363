//! What a slot is worth.

/// Which slot is given up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StrategyKind {
    /// The least recently demanded.
    Lru,
    /// The most recently demanded: the worst choice for pins, on purpose. With few slots the least
    /// recently used one hides a pin that was dropped early; this one shows it.
    Mru,
    /// The least often demanded, where a demand counts half as much after `half_life` steps.
    Lfu {
        /// In steps, at least 1.
        half_life: u32,
    },
    /// The one that is expected to be needed farthest in the future, from how often it was
    /// demanded (counts halve in `half_life` steps) and from where in the cycle its layer lies.
    LayerCycle {
        /// In steps, at least 1.
        half_life: u32,
    },
}

impl StrategyKind {
    /// Its name, for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Mru => "mru",
            Self::Lfu { .. } => "lfu",
            Self::LayerCycle { .. } => "cycle",
        }
    }
    /// Loss of the logarithm (base 2) of a count for each step.
    pub(crate) fn decay(self) -> f64 {
        match self {
            Self::Lru | Self::Mru => 0.0,
            Self::Lfu { half_life } | Self::LayerCycle { half_life } => {
                1.0 / f64::from(half_life.max(1))
            }
        }
    }
}

impl Default for StrategyKind {
    /// See `docs/decisions/0002-eviction-policy.md`.
    fn default() -> Self {
        Self::LayerCycle { half_life: 64 }
    }
}

/// Whom a miss of a layer may take a slot from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Anyone.
    #[default]
    Global,
    /// Its own layer, once that holds its share of the slots; others only if it has none to give.
    PerLayer,
}

impl Scope {
    /// Its name, for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::PerLayer => "per layer",
        }
    }
}

/// Logarithm of `2^a + 2^b`.
pub(crate) fn log_add(a: f64, b: f64) -> f64 {
    let (high, low) = if a > b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY {
        high
    } else {
        high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_add() {
        assert_eq!(log_add(3.0, 3.0), 4.0);
        assert_eq!(log_add(f64::NEG_INFINITY, 7.5), 7.5);
        assert!((log_add(0.0, 1.0) - 3_f64.log2()).abs() < 1e-12);
        assert_eq!(log_add(2000.0, -2000.0), 2000.0);
    }
}
