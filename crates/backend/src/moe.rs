//! The one loop that fetches and computes routed experts.

use crate::fetch::{ExpertFetch, ExpertSet, Failures, Ready, Routes, StepError};
use crate::layout::ExpertLayout;
use crate::verbs::{Backend, Experts, MoeFfn, Pass, Routed, View};

/// Host-side memory of [`moe_block`], reused from step to step.
#[derive(Debug, Default)]
pub struct MoeWork {
    /// Rows that failed in this step.
    pub failures: Failures,
    /// When set, every layer's routes are read and handed to it: routing traces, captures.
    pub observer: Option<RouteObserver>,
    routes: Routes,
    ready: Vec<Ready>,
    failed: Vec<(u32, StepError)>,
}

/// Sees (layer, routes) of every layer of a step.
#[expect(clippy::type_complexity, reason = "one callback, spelled once")]
pub struct RouteObserver(pub Box<dyn FnMut(u32, &Routes) + Send>);

impl std::fmt::Debug for RouteObserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RouteObserver")
    }
}

impl MoeWork {
    /// Reserves for steps of `rows` rows and `experts` experts a layer, so that none allocates.
    pub fn reserve(&mut self, rows: usize, top_k: usize, experts: usize) {
        self.failures.reset(rows);
        self.routes.set(top_k, |ids| ids.resize(rows * top_k, 0));
        self.ready.reserve(experts);
        self.failed.reserve(experts);
    }
}

/// What [`moe_block`] works on.
#[derive(Debug)]
pub struct MoeBlock<'a, B: Backend> {
    /// Layer index, as the expert source counts.
    pub layer: u32,
    /// `[n, d_model]`, the input of the experts.
    pub x: View<'a, B::Buf>,
    /// What [`Backend::route`] returned.
    pub routed: &'a Routed<B::Buf>,
    /// What the bytes of a slot mean in this layer.
    pub layout: &'a ExpertLayout,
    /// `[n, top_k, d_model]`, one row for each result.
    pub parts: &'a B::Buf,
}

/// Fetches the experts that `block.routed` names, wave by wave, and computes each as it arrives
/// into its own row of `block.parts`. `meanwhile` records what does not depend on them (the shared
/// expert); it is submitted before anything waits.
///
/// Rows whose expert could not be read are marked in `work.failures`; the others go on.
///
/// # Errors
/// When the store cannot go on, or every row has failed.
pub fn moe_block<B: Backend, F: ExpertFetch<B>>(
    b: &B,
    p: &mut B::Pass,
    fetch: &mut F,
    work: &mut MoeWork,
    block: &MoeBlock<'_, B>,
    meanwhile: impl FnOnce(&mut B::Pass),
) -> Result<(), StepError> {
    let slab = fetch.slab().clone();
    let compute = |p: &mut B::Pass, experts: Experts<'_>| {
        let args = MoeFfn { x: block.x, routed: block.routed, layout: block.layout, slab: &slab };
        b.moe_ffn(p, &args, experts, block.parts);
    };
    if let Some(observer) = &mut work.observer {
        p.read_routes(block.routed, &mut work.routes)?;
        observer.0(block.layer, &work.routes);
    }
    if let Some(first_slot) = fetch.resident(block.layer) {
        meanwhile(p);
        compute(p, Experts::Resident { first_slot });
        return Ok(());
    }
    if work.observer.is_none() {
        p.read_routes(block.routed, &mut work.routes)?;
    }
    let MoeWork { routes, ready, failed, failures, .. } = work;
    let mut waves = routes.experts().chunks(fetch.wave_experts());
    let mut set = match waves.next() {
        Some(wave) => fetch.fetch(block.layer, wave)?,
        None => return Ok(()),
    };
    meanwhile(p);
    p.submit();
    let two = fetch.waves_ahead() > 1;
    loop {
        let ahead = if two { waves.next() } else { None };
        let ahead = ahead.map(|wave| fetch.fetch(block.layer, wave)).transpose()?;
        drain(p, &mut set, ready, failed, routes, failures, &compute)?;
        set = match (ahead, two) {
            (Some(set), _) => set,
            (None, true) => return Ok(()),
            (None, false) => match waves.next() {
                Some(wave) => fetch.fetch(block.layer, wave)?,
                None => return Ok(()),
            },
        };
    }
}

/// Computes one wave to its end. The wave's pins leave with its `submit`, else the next wave would
/// wait for slots that only its own caller could free.
fn drain<P: Pass, S: ExpertSet>(
    p: &mut P,
    set: &mut S,
    ready: &mut Vec<Ready>,
    failed: &mut Vec<(u32, StepError)>,
    routes: &Routes,
    failures: &mut Failures,
    compute: &impl Fn(&mut P, Experts<'_>),
) -> Result<(), StepError> {
    loop {
        match set.next_ready(ready, failed) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                // What arrived together with the error must not pass for experts of a later layer.
                ready.clear();
                failed.clear();
                return Err(error);
            }
        }
        for (expert, error) in failed.drain(..) {
            failures.mark(routes.rows_of(expert), &error);
        }
        if failures.all() {
            ready.clear();
            let first = failures.first().expect("all rows failed for a reason");
            return Err(first.clone());
        }
        if !ready.is_empty() {
            compute(p, Experts::Ready(ready));
            assert!(ready.is_empty(), "the backend left {} pins behind", ready.len());
        }
    }
    p.submit();
    Ok(())
}
