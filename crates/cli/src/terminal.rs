//! The terminal: how wide it is, and whether it shows what is typed.

use std::sync::{Mutex, PoisonError};

/// Where a terminal does not tell.
const WIDTH: usize = 80;
/// No text can be read in less.
const WIDTH_LEAST: usize = 20;

/// Columns of the terminal on stderr; `None` where it is none.
pub(crate) fn width() -> Option<usize> {
    system::columns().map(|columns| match columns {
        0 => WIDTH,
        columns => columns.max(WIDTH_LEAST),
    })
}

/// Breaks long lines between words; what a line continues with is indented. Lines that are
/// indented themselves are tables or commands and stay as they are.
pub(crate) fn wrap(text: &str, width: usize, indent: usize) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if line.starts_with([' ', '=', '-']) || line.chars().count() <= width {
            out.push_str(line);
            continue;
        }
        let mut column = 0;
        for (index, word) in line.split(' ').enumerate() {
            let length = word.chars().count();
            if index > 0 && column + 1 + length > width {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                column = indent;
            } else if index > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += length;
        }
    }
    out
}

/// The terminal's modes before [`Silent`] changed them.
static BEFORE: Mutex<Option<system::Modes>> = Mutex::new(None);

/// While it lives the terminal does not show what is typed; that is kept for the next line.
#[derive(Debug)]
pub(crate) struct Silent(());

impl Silent {
    pub(crate) fn begin() -> Self {
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = system::silence();
        Self(())
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back as it was. Called also where a program ends without unwinding.
pub(crate) fn restore() {
    if let Some(modes) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        system::set(&modes);
    }
}

#[cfg(unix)]
mod system {
    use rustix::termios::{
        LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr,
    };

    pub(super) type Modes = Termios;

    pub(super) fn columns() -> Option<usize> {
        tcgetwinsize(std::io::stderr()).ok().map(|size| usize::from(size.ws_col))
    }

    /// Turns the echo off; the modes before, where there is a terminal.
    pub(super) fn silence() -> Option<Modes> {
        let before = tcgetattr(std::io::stdin()).ok()?;
        let mut modes = before.clone();
        modes.local_modes.remove(LocalModes::ECHO);
        set(&modes);
        Some(before)
    }

    pub(super) fn set(modes: &Modes) {
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, modes);
    }
}

#[cfg(not(unix))]
mod system {
    pub(super) type Modes = ();

    pub(super) fn columns() -> Option<usize> {
        None
    }

    pub(super) fn silence() -> Option<Modes> {
        None
    }

    pub(super) fn set((): &Modes) {}
}

#[cfg(test)]
mod tests {
    use super::wrap;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two three", 80, 2), "one two three");
        assert_eq!(wrap("one two three", 7, 2), "one two\n  three");
        assert_eq!(wrap("one\ntwo three four", 9, 0), "one\ntwo three\nfour");
        assert_eq!(wrap("averylongword two", 5, 1), "averylongword\n two");
        assert_eq!(wrap("- a table of words", 5, 1), "- a table of words");
    }
}
