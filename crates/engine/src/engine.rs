//! The engine: one loaded model and its sessions.

use crate::error::{EngineError, Result};
use crate::experts::{self, StoreFetch};
use crate::finite::FiniteProbe;
use crate::plan::{Costs, EngineOptions, Plan};
use crate::state::{Place, States};
use crate::tables::Tables;
use snowmelt_backend::{Backend, Limits, MoeWork, PAGE_TOKENS, Pass, RouteObserver, Rows};
use snowmelt_expert_store::{BlockSource, RowStats, Stats, StoreError};
use snowmelt_model::{Census, Loaded, Probe, Step};
use snowmelt_weights::Checkpoint;

/// A session of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(usize);

/// Which rows of a [`Feed`] need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// None: an inner chunk of a prompt.
    None,
    /// That of the last token.
    Last,
    /// Those of every token.
    All,
}

/// Tokens for one session in a step.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    /// Whose.
    pub session: SessionId,
    /// The next tokens of its timeline, at least one.
    pub tokens: &'a [u32],
    /// Which logits are wanted.
    pub outputs: Outputs,
}

/// Readers that the options cannot name, such as ones that inject faults; `None`: as the options
/// say.
#[derive(Debug, Default)]
pub struct Sources {
    /// Of experts.
    pub experts: Option<Box<dyn BlockSource + Send>>,
    /// Of rows of tables.
    pub rows: Option<Box<dyn BlockSource + Send>>,
}

/// One timeline of tokens.
#[derive(Debug)]
struct Session {
    tokens: Vec<u32>,
    place: Place,
    /// Logits after the last token, where they were asked for.
    logits: Vec<f32>,
    /// Why its last step failed; it is empty since.
    failed: Option<EngineError>,
}

/// A loaded model and its sessions.
///
/// Invariants: 1. a session's state is that of its tokens, always: a step that fails for a session
/// empties it; 2. nothing allocates in a step once sessions have been used (the plan's promise).
pub struct Engine<B: Backend> {
    // Fields drop in this order: what reads into the slab before what owns it.
    decoder: Loaded<B, StoreFetch<B>>,
    fetch: StoreFetch<B>,
    tables: Tables,
    states: States<B>,
    backend: B,
    sessions: Vec<Option<Session>>,
    census: Census,
    plan: Plan,
    rows: Rows,
    work: MoeWork,
    /// One row of logits, for the host.
    row: Vec<f32>,
    check_finite: bool,
}

/// A logit that is not finite.
#[derive(Clone, Copy, Debug)]
struct NonFinite {
    /// Index of its feed.
    sequence: usize,
    position: usize,
    value: f32,
}

/// Whether no value is NaN or infinite: such a value makes the sum of `0 * x` NaN.
fn all_finite(values: &[f32]) -> bool {
    let mut lanes = [0.0_f32; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += 0.0 * value;
        }
    }
    lanes.iter().chain(rest).all(|value| value.is_finite())
}

impl<B: Backend> std::fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("family", &self.census.family)
            .field("plan", &self.plan)
            .field("fetch", &self.fetch)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Engine<B> {
    /// Plans, loads the trunk and, where they are to be resident, the experts.
    ///
    /// # Errors
    /// When the checkpoint is refused, the budget is too small, or a file cannot be read.
    pub fn open(checkpoint: &Checkpoint, backend: B, options: &EngineOptions) -> Result<Self> {
        Self::open_with(checkpoint, backend, options, Sources::default())
    }

    /// As [`Self::open`], reading through `sources`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        checkpoint: &Checkpoint,
        backend: B,
        options: &EngineOptions,
        sources: Sources,
    ) -> Result<Self> {
        let census = snowmelt_model::census(checkpoint, options.model)?;
        let plan = Self::plan_for(checkpoint, &backend, &census, options)?;
        if options.check_reads {
            // Before a weight is loaded: rows may be loaded in another order than digests need.
            checkpoint.check_trunk()?;
        }
        let limits =
            Limits { rows: plan.rows, context_tokens: plan.context_tokens, ..census.limits };
        let decoder =
            snowmelt_model::load(checkpoint, &backend, options.model, &limits, plan.outputs)?;
        let states =
            States::new(&backend, &census.state, options.kv, plan.sessions, plan.context_tokens);
        let Sources { experts, rows } = sources;
        let fetch = StoreFetch::open(&backend, checkpoint, &census, &plan, options, experts)?;
        let reads = (options.io, options.read_timeout);
        let tables = Tables::open(checkpoint, &census, &plan, reads, rows)?;
        let mut rows = Rows::default();
        let pages = plan.context_tokens.div_ceil(PAGE_TOKENS) * plan.sessions;
        rows.reserve(plan.rows, plan.sessions, pages, plan.sessions * census.history_tokens);
        let mut work = MoeWork::default();
        work.reserve(plan.rows, census.limits.top_k, census.limits.n_experts);
        Ok(Self {
            decoder,
            fetch,
            tables,
            states,
            backend,
            sessions: Vec::with_capacity(plan.sessions),
            row: vec![0.0; census.n_vocab],
            check_finite: options.check_finite,
            census,
            plan,
            rows,
            work,
        })
    }

    /// The plan that [`Self::open`] would follow, from headers alone.
    ///
    /// # Errors
    /// When the budget is too small or a request contradicts the config.
    pub fn plan_for(
        checkpoint: &Checkpoint,
        backend: &B,
        census: &Census,
        options: &EngineOptions,
    ) -> Result<Plan> {
        let scratch = |limits: &Limits| backend.scratch_bytes(limits);
        let costs = Costs {
            is_aligned: experts::is_aligned(census),
            in_memory: experts::is_in_memory(checkpoint),
            ..Costs::now(&scratch, backend.submissions_in_flight())
        };
        Plan::new(census, options, costs)
    }

    /// What the model needs and is.
    pub fn census(&self) -> &Census {
        &self.census
    }

    /// The plan that the engine follows.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Counters of the expert store since open.
    pub fn stats(&self) -> Stats {
        self.fetch.stats()
    }

    /// Counters of the cache of rows of tables since open.
    pub fn row_stats(&self) -> RowStats {
        self.tables.stats()
    }

    /// What experts are read with; `None` where nothing streams.
    pub fn source_name(&self) -> Option<&'static str> {
        self.fetch.source_name()
    }

    /// The first failure of the store, of experts or of rows, after which it reads no more.
    pub fn store_failed(&self) -> Option<StoreError> {
        self.fetch.failed().or_else(|| self.tables.failed())
    }

    /// Shows (layer, routes) of every step to `observer`, until it is taken away with `None`.
    pub fn observe_routes(&mut self, observer: Option<RouteObserver>) {
        self.work.observer = observer;
    }

    /// A new, empty session.
    ///
    /// # Errors
    /// When all planned sessions are in use.
    pub fn session(&mut self) -> Result<SessionId> {
        let mut p = self.backend.begin();
        let place = self
            .states
            .take(&self.backend, &mut p)
            .ok_or(EngineError::Sessions { sessions: self.plan.sessions })?;
        p.submit();
        let session = Session {
            tokens: Vec::with_capacity(self.plan.context_tokens),
            place,
            logits: Vec::with_capacity(self.census.n_vocab),
            failed: None,
        };
        let free = self.sessions.iter().position(Option::is_none);
        let index = free.unwrap_or(self.sessions.len());
        match free {
            Some(index) => self.sessions[index] = Some(session),
            None => self.sessions.push(Some(session)),
        }
        Ok(SessionId(index))
    }

    /// Ends a session and frees its state.
    pub fn close(&mut self, session: SessionId) {
        if let Some(session) = self.sessions[session.0].take() {
            self.states.give_back(session.place);
        }
    }

    /// Empties a session.
    pub fn reset(&mut self, session: SessionId) {
        let mut p = self.backend.begin();
        let session = self.sessions[session.0].as_mut().expect("an open session");
        session.tokens.clear();
        session.logits.clear();
        session.failed = None;
        self.states.reset(&self.backend, &mut p, &mut session.place);
        p.submit();
    }

    fn get(&self, session: SessionId) -> &Session {
        self.sessions[session.0].as_ref().expect("an open session")
    }

    /// The tokens that a session's state is the state of.
    pub fn tokens(&self, session: SessionId) -> &[u32] {
        &self.get(session).tokens
    }

    /// Logits `[n_vocab]` after the last token, where its step asked for them; else empty.
    pub fn logits(&self, session: SessionId) -> &[f32] {
        &self.get(session).logits
    }

    /// Takes the reason why a session's last step failed alone; the session is empty since.
    pub fn take_failure(&mut self, session: SessionId) -> Option<EngineError> {
        self.sessions[session.0].as_mut().and_then(|session| session.failed.take())
    }

    /// One step: rows of several sessions as one batch. `sink(feed, token, logits)` sees the
    /// logits asked for, by index of the feed and of the token in it.
    ///
    /// A session whose experts could not be read is emptied and says why in
    /// [`Self::take_failure`]; the others go on.
    ///
    /// # Errors
    /// Bad input leaves all sessions as they were. When the step as a whole fails, its sessions
    /// are emptied.
    pub fn step(
        &mut self,
        feed: &[Feed<'_>],
        sink: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<()> {
        self.step_probed(feed, sink, None)
    }

    /// The same, while `probe` looks at values inside.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_probed(
        &mut self,
        feed: &[Feed<'_>],
        sink: &mut dyn FnMut(usize, usize, &[f32]),
        probe: Option<&mut dyn Probe<B>>,
    ) -> Result<()> {
        self.check(feed)?;
        let mut p = self.backend.begin();
        for one in feed {
            let session = self.sessions[one.session.0].as_mut().expect("checked");
            let tokens = session.tokens.len() + one.tokens.len();
            self.states.grow(&mut session.place, tokens);
            session.logits.clear();
        }
        let (sessions, looks_back) = (&self.sessions, self.census.history_tokens);
        self.rows.rewrite(|draft| {
            for one in feed {
                let session = sessions[one.session.0].as_ref().expect("checked");
                draft.sequence(session.place.fixed, session.place.pages.iter().copied());
                let known = &session.tokens;
                draft.history(&known[known.len().saturating_sub(looks_back)..]);
                for (index, &token) in one.tokens.iter().enumerate() {
                    let is_last = index + 1 == one.tokens.len();
                    let output = match one.outputs {
                        Outputs::None => false,
                        Outputs::Last => is_last,
                        Outputs::All => true,
                    };
                    let position = (session.tokens.len() + index) as u32;
                    draft.row(position, token, output);
                }
            }
        });
        self.work.failures.reset(self.rows.len());
        self.tables.begin();
        let mut step = Step {
            b: &self.backend,
            p: &mut p,
            rows: &self.rows,
            state: &self.states.bufs,
            fetch: &mut self.fetch,
            tables: &mut self.tables,
            work: &mut self.work,
            // Taken apart, so that its lifetime may shrink.
            probe: match probe {
                Some(probe) => Some(probe),
                None => None,
            },
        };
        let done = self.decoder.forward(&mut step).map_err(EngineError::from);
        let done = done.and_then(|()| self.read_logits(&mut p, feed, sink));
        drop(p);
        match done {
            Ok(Some(seen)) => Err(self.locate_non_finite(feed, seen)),
            Ok(None) => self.settle(feed, Ok(())),
            Err(error) => self.settle(feed, Err(error)),
        }
    }

    /// Runs the tokens of a session once more, to name the layer and stage of the first value that
    /// is not finite. All sessions of the step are emptied.
    fn locate_non_finite(&mut self, feed: &[Feed<'_>], seen: NonFinite) -> EngineError {
        let Feed { session, tokens, .. } = feed[seen.sequence];
        let all = [self.tokens(session), tokens].concat();
        for one in feed {
            self.reset(one.session);
        }
        let mut probe = FiniteProbe::default();
        let mut done = 0;
        for chunk in all.chunks(self.plan.rows) {
            let feed = [Feed { session, tokens: chunk, outputs: Outputs::None }];
            if let Err(error) = self.step_probed(&feed, &mut |_, _, _| {}, Some(&mut probe)) {
                return error;
            }
            if let Some(error) = self.take_failure(session) {
                return error;
            }
            if probe.found().is_some() {
                break;
            }
            done += chunk.len();
        }
        self.reset(session);
        let (stage, position, value) = match probe.found() {
            Some((stage, row, value)) => {
                let stage = format!("`{}` of layer {}", stage.name, stage.layer);
                (stage, done + row, value)
            }
            None => ("a logit".to_owned(), seen.position, seen.value),
        };
        EngineError::NotFinite { stage, position, value }
    }

    fn check(&self, feed: &[Feed<'_>]) -> Result<()> {
        let rows: usize = feed.iter().map(|one| one.tokens.len()).sum();
        assert!(rows <= self.plan.rows, "{rows} rows in a step planned for {}", self.plan.rows);
        for (index, one) in feed.iter().enumerate() {
            let twice = feed[..index].iter().any(|other| other.session == one.session);
            assert!(!twice, "a session stands in a step twice");
            if one.tokens.is_empty() {
                return Err(EngineError::EmptyPrompt);
            }
            let (limit, model) = (self.plan.context_tokens, self.census.context_max);
            let got = self.get(one.session).tokens.len() + one.tokens.len();
            if got > limit {
                return Err(EngineError::Context { got, limit, model });
            }
            let n_vocab = self.census.n_vocab;
            let bad = one.tokens.iter().position(|&id| id as usize >= n_vocab);
            if let Some(index) = bad {
                return Err(EngineError::Token { id: one.tokens[index], index, n_vocab });
            }
        }
        Ok(())
    }

    /// Logits in groups of at most as many rows as there is scratch for. Returns the first that is
    /// not finite; nothing is shown of its row or after it.
    fn read_logits(
        &mut self,
        p: &mut B::Pass,
        feed: &[Feed<'_>],
        sink: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<Option<NonFinite>> {
        let (outputs, n_vocab) = (self.rows.outputs().len(), self.census.n_vocab);
        let mut first = 0;
        while first < outputs {
            let last = (first + self.plan.outputs).min(outputs);
            let buf = self.decoder.head(&self.backend, p, &self.rows, first..last);
            for output in first..last {
                let row = self.rows.outputs()[output] as usize;
                if self.work.failures.is_failed(row) {
                    continue;
                }
                let at = (output - first) * n_vocab;
                p.read(buf, at..at + n_vocab, &mut self.row)?;
                let sequence = self.rows.rows()[row].sequence as usize;
                if self.check_finite && !all_finite(&self.row) {
                    let value = self.row.iter().copied().find(|value| !value.is_finite());
                    let position = self.rows.rows()[row].position as usize;
                    return Ok(value.map(|value| NonFinite { sequence, position, value }));
                }
                let token = row - self.rows.sequences()[sequence].rows.start;
                sink(sequence, token, &self.row);
                if token + 1 == feed[sequence].tokens.len() {
                    let session = &mut self.sessions[feed[sequence].session.0];
                    let session = session.as_mut().expect("checked");
                    session.logits.clear();
                    session.logits.extend_from_slice(&self.row);
                }
            }
            first = last;
        }
        Ok(None)
    }

    /// Tokens of the sessions that made it; the others are emptied.
    fn settle(&mut self, feed: &[Feed<'_>], done: Result<()>) -> Result<()> {
        for (sequence, one) in feed.iter().enumerate() {
            let rows = self.rows.sequences()[sequence].rows.clone();
            let failed = rows.into_iter().any(|row| self.work.failures.is_failed(row));
            if done.is_ok() && !failed {
                let session = self.sessions[one.session.0].as_mut().expect("checked");
                session.tokens.extend_from_slice(one.tokens);
                continue;
            }
            self.reset(one.session);
            if done.is_ok() {
                let first = self.work.failures.first().cloned();
                let session = self.sessions[one.session.0].as_mut().expect("checked");
                session.failed = first.map(EngineError::from);
            }
        }
        done
    }

    /// Feeds `tokens` to one session in chunks of at most the planned rows, and keeps the logits
    /// after the last. `progress(done)` is called after each chunk and may end it early.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn prefill(
        &mut self,
        session: SessionId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<()> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let got = self.get(session).tokens.len() + tokens.len();
        let (limit, model) = (self.plan.context_tokens, self.census.context_max);
        if got > limit {
            return Err(EngineError::Context { got, limit, model });
        }
        let mut done = 0;
        for chunk in tokens.chunks(self.plan.rows) {
            done += chunk.len();
            let outputs = if done == tokens.len() { Outputs::Last } else { Outputs::None };
            self.step_one(session, chunk, outputs, &mut |_, _| {})?;
            if !progress(done) {
                break;
            }
        }
        Ok(())
    }

    /// A step of one session; its failure is the step's. `sink(token, logits)`.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_one(
        &mut self,
        session: SessionId,
        tokens: &[u32],
        outputs: Outputs,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let feed = [Feed { session, tokens, outputs }];
        self.step(&feed, &mut |_, token, logits| sink(token, logits))?;
        self.take_failure(session).map_or(Ok(()), Err)
    }
}
