//! The chat as people have it: through a pseudo terminal.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// No step of a test takes as long on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program on a terminal of its own.
struct Terminal {
    child: Child,
    keyboard: File,
    /// The program's end, to look at its modes.
    line: File,
    pieces: Receiver<Vec<u8>>,
    screen: String,
    /// What of the screen was waited for already.
    seen: usize,
    _home: TempDir,
}

impl Terminal {
    fn start(args: &[&str]) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let open = || {
            let name = name.to_str().unwrap();
            File::options().read(true).write(true).open(name).unwrap()
        };
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&keyboard, size).unwrap();
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_snowmelt"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SNOWMELT_") {
                command.env_remove(name);
            }
        }
        command.args(args).env("SNOWMELT_HOME", home.path()).env("TERM", "xterm");
        command.env("NO_COLOR", "1").stdin(open()).stdout(open()).stderr(open());
        let line = open();
        let child = command.spawn().unwrap();
        let keyboard = File::from(keyboard);
        let mut screen = keyboard.try_clone().unwrap();
        let (sender, pieces) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut piece) {
                if sender.send(piece[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        let screen = String::new();
        Self { child, keyboard, line, pieces, screen, seen: 0, _home: home }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// What came up to and with `text`.
    fn wait_for(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.screen[self.seen..].find(text) {
                let from = self.seen;
                self.seen += at + text.len();
                return self.screen[from..self.seen].to_owned();
            }
            assert!(start.elapsed() < PATIENCE, "no `{text}` in {}", self.screen);
            if let Ok(piece) = self.pieces.recv_timeout(Duration::from_secs(1)) {
                self.screen.push_str(&String::from_utf8_lossy(&piece));
            }
        }
    }

    fn modes(&self) -> LocalModes {
        tcgetattr(self.line.as_fd()).unwrap().local_modes
    }

    fn interrupt(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    }

    /// The exit code; the terminal has to be as it was.
    fn end(mut self, before: LocalModes) -> Option<i32> {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if start.elapsed() > PATIENCE {
                self.child.kill().unwrap();
                panic!("it does not end: {}", self.screen);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(self.modes(), before);
        self.child.wait().unwrap().code()
    }
}

#[test]
fn a_chat_answers_and_gives_the_terminal_back() {
    let mut terminal = Terminal::start(&["run", "tiny", "--temp", "0", "--ignore-eos"]);
    let before = terminal.modes();
    assert!(before.contains(LocalModes::ECHO));
    terminal.wait_for(">>> ");
    terminal.press("/set max-tokens 300\r");
    terminal.wait_for("max-tokens = 300");
    terminal.press("/set stop ###\r");
    terminal.wait_for("stop = ###");
    terminal.press("/unset temp\r");
    terminal.wait_for("temp is left to the model");
    terminal.press("/set top-p 7\r");
    terminal.wait_for("--top-p");
    terminal.press("/clear now\r");
    terminal.wait_for("`/clear` takes no `now`");
    terminal.wait_for(">>> ");
    terminal.press("Tell me a story.\r");
    terminal.wait_for("Tell me a story.");
    // Lines are not edited while an answer comes, and what is typed is not shown.
    let start = Instant::now();
    while terminal.modes() & (LocalModes::ICANON | LocalModes::ECHO) != LocalModes::ICANON {
        assert!(start.elapsed() < PATIENCE, "the echo stays");
        std::thread::yield_now();
    }
    terminal.press("/show\r");
    let answer = terminal.wait_for("answer 300 tokens");
    assert!(answer.split_whitespace().count() > 100 && !answer.contains("/show"), "{answer}");
    let shown = terminal.wait_for("system     none");
    for text in ["tiny", "max-tokens 300", "stop       \"###\"", "frequency-penalty 0"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    assert!(shown.lines().all(|line| line.trim_end().chars().count() <= 80), "{shown}");
    terminal.wait_for(">>> ");
    terminal.press("/bye\r");
    assert_eq!(terminal.end(before), Some(0));
}

#[test]
fn ctrl_c_stops_an_answer_and_then_leaves() {
    let mut terminal = Terminal::start(&["run", "tiny", "--temp", "0", "--ignore-eos"]);
    let before = terminal.modes();
    terminal.wait_for(">>> ");
    terminal.press("Tell me a story.\r");
    terminal.wait_for("Once");
    terminal.interrupt();
    terminal.wait_for("(stopped)");
    terminal.wait_for(">>> ");
    terminal.press("\x03");
    terminal.wait_for("Ctrl-C again");
    terminal.wait_for(">>> ");
    terminal.press("\x03");
    assert_eq!(terminal.end(before), Some(130));
}

#[test]
fn a_prompt_from_the_keyboard_is_asked_for() {
    let mut terminal = Terminal::start(&["run", "tiny", "--json", "-n", "2"]);
    let before = terminal.modes();
    terminal.wait_for("type a prompt; Ctrl-D on a line of its own ends it");
    terminal.press("Hello\n\x04");
    terminal.wait_for("\"output_ids\"");
    terminal.wait_for("}\r\n}");
    assert_eq!(terminal.end(before), Some(0));
}

#[test]
fn messages_break_between_words() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/oracle/qwen3_moe");
    let mut terminal = Terminal::start(&["run", model, "Hello"]);
    let before = terminal.modes();
    let said = terminal.wait_for("was published");
    let broken = said.lines().filter(|line| line.trim_end().chars().count() > 80);
    assert!(broken.clone().all(|line| line.contains("fixtures")), "{said}");
    assert!(said.contains("hint: give token ids"), "{said}");
    assert_eq!(terminal.end(before), Some(1));
}
