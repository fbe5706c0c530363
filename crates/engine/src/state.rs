//! Named state buffers and where each session lives in them.

use snowmelt_backend::{Backend, BufType, PAGE_TOKENS};
use snowmelt_model::{StateDecl, StateKind};

/// One session's place in every state buffer.
#[derive(Debug)]
pub(crate) struct Place {
    /// Page numbers by position.
    pub(crate) pages: Vec<u32>,
    /// Row of per-sequence buffers.
    pub(crate) fixed: u32,
}

/// All state buffers, allocated at open, and their free places.
#[derive(Debug)]
pub(crate) struct States<B: Backend> {
    decls: Vec<StateDecl>,
    pub(crate) bufs: Vec<B::Buf>,
    free_pages: Vec<u32>,
    free_fixed: Vec<u32>,
    pages_a_session: usize,
}

impl<B: Backend> States<B> {
    pub(crate) fn new(
        b: &B,
        decls: &[StateDecl],
        kv: BufType,
        sessions: usize,
        context_tokens: usize,
    ) -> Self {
        let pages_a_session = context_tokens.div_ceil(PAGE_TOKENS);
        let pages = sessions * pages_a_session;
        let alloc = |decl: &StateDecl| match decl.kind {
            StateKind::PerToken { width } => b.alloc(pages * PAGE_TOKENS * width, kv),
            StateKind::PerSequence { len } => b.alloc(sessions * len, BufType::F32),
        };
        Self {
            decls: decls.to_vec(),
            bufs: decls.iter().map(alloc).collect(),
            free_pages: (0..pages as u32).rev().collect(),
            free_fixed: (0..sessions as u32).rev().collect(),
            pages_a_session,
        }
    }

    /// A place for a new, empty session, or `None` where all are taken.
    pub(crate) fn take(&mut self, b: &B, p: &mut B::Pass) -> Option<Place> {
        let fixed = self.free_fixed.pop()?;
        let place = Place { pages: Vec::with_capacity(self.pages_a_session), fixed };
        self.clear(b, p, &place);
        Some(place)
    }

    /// Zeros in the per-sequence buffers. Pages need none: no query reads past its own position.
    fn clear(&self, b: &B, p: &mut B::Pass, place: &Place) {
        for (decl, buf) in self.decls.iter().zip(&self.bufs) {
            if let StateKind::PerSequence { len } = decl.kind {
                let first = place.fixed as usize * len;
                b.clear(p, buf, first..first + len);
            }
        }
    }

    /// Empties a session.
    pub(crate) fn reset(&mut self, b: &B, p: &mut B::Pass, place: &mut Place) {
        self.free_pages.append(&mut place.pages);
        self.clear(b, p, place);
    }

    /// Gives a place back.
    pub(crate) fn give_back(&mut self, mut place: Place) {
        self.free_pages.append(&mut place.pages);
        self.free_fixed.push(place.fixed);
    }

    /// Pages for positions up to `tokens`.
    ///
    /// # Panics
    /// Past the planned context, which callers check.
    pub(crate) fn grow(&mut self, place: &mut Place, tokens: usize) {
        while place.pages.len() * PAGE_TOKENS < tokens {
            let page = self.free_pages.pop().expect("planned for every session's context");
            place.pages.push(page);
        }
    }
}
