//! Offline: what hit rate would a policy have over a trace of routes, and what would the best be?
//!
//! Drives the same [`Policy`] as the store does, without any bytes.

mod generate;
mod optimum;
mod trace;

pub use generate::TraceSpec;
pub use optimum::optimum;
pub use trace::Trace;

use crate::key::Key;
use crate::policy::{Planned, Policy, PolicyOptions, Scope, StrategyKind};
use std::fmt;

/// Keys asked for, and those of them that were there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// There.
    pub hits: u64,
    /// Asked for.
    pub asked: u64,
}

impl Hits {
    /// Their quotient; 0 if nothing was asked for.
    pub fn rate(self) -> f64 {
        if self.asked == 0 { 0.0 } else { self.hits as f64 / self.asked as f64 }
    }
}

/// Runs a policy over a trace; counts from step `from_step` on.
///
/// # Panics
/// If a visit names more experts than there are slots.
pub fn simulate(trace: &Trace, slots: u32, options: PolicyOptions, from_step: u64) -> Hits {
    let n_experts = vec![trace.n_experts(); trace.n_layers() as usize];
    let mut policy = Policy::new(slots, &n_experts, options);
    let (mut keys, mut planned, mut count) = (Vec::new(), Vec::new(), Hits::default());
    for (step, layer, experts) in trace.visits() {
        keys.clear();
        keys.extend(experts.iter().map(|&expert| Key { layer, expert }));
        policy.plan(&keys, &mut planned);
        for planned in planned.drain(..) {
            let hit = match planned {
                Planned::Hit(..) => true,
                Planned::Read(_, pin) => {
                    policy.commit(pin.slot(), true);
                    false
                }
                Planned::Join(..) => false,
                Planned::Wait(key) => panic!("`{slots}` slots are too few for {key}"),
            };
            if step >= from_step {
                count.asked += 1;
                count.hits += u64::from(hit);
            }
        }
    }
    count
}

/// The policies worth comparing.
pub fn candidates() -> Vec<PolicyOptions> {
    let strategies = [
        StrategyKind::Lru,
        StrategyKind::Lfu { half_life: 64 },
        StrategyKind::LayerCycle { half_life: 16 },
        StrategyKind::LayerCycle { half_life: 64 },
        StrategyKind::LayerCycle { half_life: 128 },
    ];
    let with = |scope| move |strategy| PolicyOptions { strategy, scope, ..Default::default() };
    let all = strategies.into_iter();
    all.clone().map(with(Scope::Global)).chain(all.map(with(Scope::PerLayer))).collect()
}

/// Hit rates of policies at several capacities, and the optimum.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Share of all records that the slots hold, for each column.
    pub capacities: Vec<f64>,
    /// The policies with their rates.
    pub rows: Vec<(PolicyOptions, Vec<f64>)>,
    /// What no policy can exceed.
    pub optimum: Vec<f64>,
}

/// Runs all `candidates` over the trace. Counts after the first quarter of its steps, so that the
/// first reads of all records do not hide the differences; the optimum too.
pub fn compare(trace: &Trace, capacities: &[f64], candidates: &[PolicyOptions]) -> Comparison {
    let records = f64::from(trace.n_layers() * trace.n_experts());
    let slots: Vec<u32> = capacities.iter().map(|share| (records * share) as u32).collect();
    let from = trace.n_steps() / 4;
    let rates = |options: &PolicyOptions| {
        let rate = |&slots: &u32| simulate(trace, slots, *options, from).rate();
        (*options, slots.iter().map(rate).collect())
    };
    Comparison {
        capacities: capacities.to_vec(),
        rows: candidates.iter().map(rates).collect(),
        optimum: slots.iter().map(|&slots| optimum(trace, slots, from).rate()).collect(),
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, rates: &[f64]| {
            write!(f, "{name:<24}")?;
            rates.iter().try_for_each(|rate| write!(f, "{:>8.1}", rate * 100.0))?;
            writeln!(f)
        };
        row(f, "slots, % of records", &self.capacities)?;
        for (options, rates) in &self.rows {
            let half_life = match options.strategy {
                StrategyKind::Lfu { half_life } | StrategyKind::LayerCycle { half_life } => {
                    format!(" {half_life}")
                }
                _ => String::new(),
            };
            let name = format!("{}{half_life}, {}", options.strategy.name(), options.scope.name());
            row(f, &name, rates)?;
        }
        row(f, "optimum", &self.optimum)
    }
}

#[cfg(test)]
mod tests;
