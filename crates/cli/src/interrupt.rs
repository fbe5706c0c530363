//! Ctrl-C: the first asks whatever can stop halfway to do so, the next leaves at once. Where
//! nothing can stop halfway the first one leaves.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

/// Exit code of a program that Ctrl-C ended: 128 and the number of the signal.
pub(crate) const EXIT: u8 = 130;

const LEAVE: u8 = 0;
const CAN_STOP: u8 = 1;
const STOPPING: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(LEAVE);
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Handles Ctrl-C from now on.
pub(crate) fn install() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        let asked = STATE.compare_exchange(CAN_STOP, STOPPING, Ordering::SeqCst, Ordering::SeqCst);
        if asked.is_err() {
            leave();
        }
    })
}

/// Ends the program as Ctrl-C does.
pub(crate) fn leave() -> ! {
    crate::terminal::restore();
    for path in lock().drain(..) {
        let _ = std::fs::remove_file(path);
    }
    std::process::exit(i32::from(EXIT));
}

fn lock() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, the first Ctrl-C only sets [`Stoppable::is_asked`].
#[derive(Debug)]
pub(crate) struct Stoppable(());

impl Stoppable {
    pub(crate) fn begin() -> Self {
        STATE.store(CAN_STOP, Ordering::SeqCst);
        Self(())
    }

    /// Whether Ctrl-C was pressed.
    pub(crate) fn is_asked(&self) -> bool {
        let Self(()) = self;
        STATE.load(Ordering::SeqCst) == STOPPING
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        STATE.store(LEAVE, Ordering::SeqCst);
    }
}

/// A file that is removed, also by Ctrl-C, unless it is kept.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    pub(crate) fn new(path: PathBuf) -> Self {
        lock().push(path.clone());
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn forget(&self) {
        lock().retain(|path| *path != self.path);
    }

    /// Gives the file its name.
    pub(crate) fn keep_as(self, path: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, path)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // After a rename there is nothing to remove.
        let _ = std::fs::remove_file(&self.path);
        self.forget();
    }
}
