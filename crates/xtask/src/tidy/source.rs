//! A Rust file, split into code, comments and tests: as much of the grammar as the rules need.

use std::ops::Range;

/// Code and comments have the length of the file, so a byte offset means the same in all of them.
#[derive(Debug)]
pub(crate) struct Source {
    /// Comments, and what strings and characters hold, are blank.
    pub(crate) code: String,
    /// Everything but comments is blank.
    pub(crate) comments: String,
    /// Modules outside this file that only tests have: `#[cfg(test)] mod name;`
    pub(crate) test_modules: Vec<String>,
    line_starts: Vec<usize>,
    test_lines: Vec<bool>,
}

/// A function with a body, or a required method.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Line of `fn`, from 1.
    pub(crate) line: usize,
    /// Lines from `fn` to the closing brace.
    pub(crate) lines: usize,
    /// Parameters without the receiver.
    pub(crate) params: usize,
    /// Offset of `fn`.
    pub(crate) offset: usize,
    pub(crate) has_body: bool,
}

impl Source {
    /// `is_test`: all of the file is a test.
    pub(crate) fn parse(text: &str, is_test: bool) -> Self {
        let (code, comments) = split(text);
        let starts = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let line_starts: Vec<usize> = [0].into_iter().chain(starts.map(|(at, _)| at + 1)).collect();
        let test_lines = vec![is_test; line_starts.len()];
        let test_modules = Vec::new();
        let mut source = Self { code, comments, test_modules, line_starts, test_lines };
        source.find_tests();
        source
    }

    /// Line of an offset, from 1.
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= offset)
    }

    /// Whether the line (from 1) is part of a test.
    pub(crate) fn is_test_line(&self, line: usize) -> bool {
        self.test_lines.get(line - 1).copied().unwrap_or(false)
    }

    /// Lines outside tests.
    pub(crate) fn product_lines(&self) -> usize {
        // The part behind the last newline is no line.
        let lines = self.line_starts.len() - 1;
        self.test_lines[..lines].iter().filter(|&&test| !test).count()
    }

    /// Lines on which the code names `path` as whole words; `std::fs` is also found in
    /// `use std::{fs, io}`.
    pub(crate) fn lines_naming(&self, path: &str) -> Vec<usize> {
        let mut lines: Vec<usize> =
            words(&self.code, path).into_iter().map(|offset| self.line(offset)).collect();
        if let Some((parent, name)) = path.rsplit_once("::") {
            for at in words(&self.code, parent) {
                let open = at + parent.len();
                if self.code[open..].starts_with("::{") {
                    let group = open + 2..self.closing(open + 2);
                    let inside = self.top_level(group);
                    let first = |part: &Range<usize>| leading_word(&self.code[part.clone()]);
                    let found = inside.into_iter().filter(|part| first(part) == name);
                    lines.extend(found.map(|part| {
                        let blank = self.code[part.clone()].len()
                            - self.code[part.clone()].trim_start().len();
                        self.line(part.start + blank)
                    }));
                }
            }
        }
        lines.sort_unstable();
        lines.dedup();
        lines
    }

    /// Every `fn name`.
    pub(crate) fn functions(&self) -> Vec<Function> {
        words(&self.code, "fn").into_iter().filter_map(|at| self.function(at)).collect()
    }

    fn function(&self, offset: usize) -> Option<Function> {
        let bytes = self.code.as_bytes();
        let name = leading_word(&self.code[offset + 2..]);
        if name.is_empty() {
            return None; // `fn(usize)`, a type, or a fragment of a macro
        }
        let mut angles = 0;
        let mut at = offset + 2;
        while bytes.get(at) != Some(&b'(') || angles > 0 {
            match bytes.get(at)? {
                b'<' => angles += 1,
                b'>' if !matches!(bytes[at - 1], b'-' | b'=') => angles -= 1,
                b'{' | b';' if angles == 0 => return None,
                _ => {}
            }
            at += 1;
        }
        let close = self.closing(at);
        let parts = self.top_level(at..close);
        let is_receiver = |part: &Range<usize>| {
            let text = self.code[part.clone()].split(':').next().unwrap_or("");
            words(text, "self").len() == 1
        };
        let params = parts.iter().filter(|part| !is_receiver(part)).count();
        let mut end = close + 1;
        let mut brackets = 0;
        let has_body = loop {
            match bytes.get(end)? {
                b'[' | b'(' => brackets += 1,
                b']' | b')' => brackets -= 1,
                b'{' if brackets == 0 => break true,
                b';' if brackets == 0 => break false,
                _ => {}
            }
            end += 1;
        };
        let last = if has_body { self.closing(end) } else { end };
        let line = self.line(offset);
        let lines = self.line(last) - line + 1;
        Some(Function { name: name.to_owned(), line, lines, params, offset, has_body })
    }

    /// Where the bracket at `open` is closed; the end of the file where it is not.
    pub(crate) fn closing(&self, open: usize) -> usize {
        let mut depth = 0;
        for (at, byte) in self.code.bytes().enumerate().skip(open) {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return at;
            }
        }
        self.code.len() - 1
    }

    /// Parts between commas inside the brackets of `group`, without empty ones.
    fn top_level(&self, group: Range<usize>) -> Vec<Range<usize>> {
        let bytes = self.code.as_bytes();
        let mut parts = Vec::new();
        let (mut depth, mut start) = (0, group.start + 1);
        for at in group.start + 1..=group.end.min(bytes.len() - 1) {
            match bytes[at] {
                b',' if depth == 0 => {
                    parts.push(start..at);
                    start = at + 1;
                }
                b'(' | b'[' | b'{' | b'<' => depth += 1,
                b'>' if matches!(bytes[at - 1], b'-' | b'=') => {}
                b')' | b']' | b'}' | b'>' => depth -= 1,
                _ => {}
            }
        }
        parts.push(start..group.end);
        parts.retain(|part| !self.code[part.clone()].trim().is_empty());
        parts
    }

    /// Marks items behind `#[cfg(test)]`.
    fn find_tests(&mut self) {
        let mut from = 0;
        while let Some(found) = self.code[from..].find("#[cfg(") {
            let start = from + found;
            let end = self.closing(start + 1);
            from = end;
            let condition = &self.code[start..end];
            if words(condition, "test").is_empty() || condition.contains("not(") {
                continue;
            }
            let mut at = end + 1;
            let rest = loop {
                let rest = &self.code[at..];
                at += rest.len() - rest.trim_start().len();
                if !self.code[at..].starts_with("#[") {
                    break &self.code[at..];
                }
                at = self.closing(at + 1) + 1;
            };
            let Some(stop) = rest.find(['{', ';']) else { continue };
            let last = match rest.as_bytes()[stop] {
                b'{' => self.closing(at + stop),
                _ => at + stop,
            };
            let head: Vec<&str> = rest[..stop].split_whitespace().collect();
            if let [.., "mod", name] = head.as_slice()
                && rest.as_bytes()[stop] == b';'
            {
                self.test_modules.push((*name).to_owned());
            }
            let lines = self.line(start) - 1..self.line(last);
            self.test_lines[lines].fill(true);
            from = last;
        }
    }
}

/// Offsets at which `path` stands as whole words.
pub(crate) fn words(code: &str, path: &str) -> Vec<usize> {
    let is_word = |byte: Option<u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
    let bytes = code.as_bytes();
    let whole = |at: &usize| {
        let before = at.checked_sub(1).map(|at| bytes[at]);
        !is_word(before) && !is_word(bytes.get(at + path.len()).copied())
    };
    code.match_indices(path).map(|(at, _)| at).filter(whole).collect()
}

/// The word that a text begins with, behind blanks.
fn leading_word(text: &str) -> &str {
    let text = text.trim_start();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    &text[..text.find(|c| !is_word(c)).unwrap_or(text.len())]
}

/// Code and comments of a file.
fn split(text: &str) -> (String, String) {
    let bytes = text.as_bytes();
    let blank = || -> Vec<u8> {
        bytes.iter().map(|&byte| if byte == b'\n' { b'\n' } else { b' ' }).collect()
    };
    let (mut code, mut comments) = (blank(), blank());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        if rest.starts_with(b"//") {
            let len = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
            comments[at..at + len].copy_from_slice(&rest[..len]);
            at += len;
        } else if rest.starts_with(b"/*") {
            let len = block_comment(rest);
            comments[at..at + len].copy_from_slice(&rest[..len]);
            at += len;
        } else if let Some(len) = literal(bytes, at) {
            code[at] = b'"';
            code[at + len - 1] = b'"';
            at += len;
        } else {
            code[at] = bytes[at];
            at += 1;
        }
    }
    let whole = "pieces of a text, cut at ASCII";
    (String::from_utf8(code).expect(whole), String::from_utf8(comments).expect(whole))
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
        } else {
            at += 1;
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Length of the string or character that begins here, with its quotes.
fn literal(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let starts_word = |at: usize| at == 0 || !is_word(bytes[at - 1]);
    match rest[0] {
        b'"' => Some(escaped(rest, b'"')),
        b'\'' if rest.get(1) == Some(&b'\\') => Some(escaped(rest, b'\'')),
        b'\'' => {
            // A lifetime has no quote behind its first character.
            let second = std::str::from_utf8(rest.get(1..5.min(rest.len()))?);
            let valid = second.map_or_else(|error| error.valid_up_to(), str::len);
            let first = std::str::from_utf8(&rest[1..=valid]).ok()?.chars().next()?;
            let quote = 1 + first.len_utf8();
            (rest.get(quote) == Some(&b'\'')).then_some(quote + 1)
        }
        b'r' if starts_word(at) || (b"bc".contains(&bytes[at - 1]) && starts_word(at - 1)) => {
            let hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
            if rest.get(1 + hashes) != Some(&b'"') {
                return None;
            }
            let end = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
            let from = 2 + hashes;
            let found = rest[from..].windows(end.len()).position(|window| window == end);
            Some(found.map_or(rest.len(), |found| from + found + end.len()))
        }
        _ => None,
    }
}

fn escaped(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Source {
        let source = Source::parse(text, false);
        assert_eq!((source.code.len(), source.comments.len()), (text.len(), text.len()));
        source
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        let text = "a /* b /* c */ d */ e // f\n\"g\\\"h\" 'i' '\\'' 'j: &'k l \
            r#\"m\"n\"# br\"o\" r#p 'ü'";
        let source = parse(text);
        let code: String = source.code.split_whitespace().collect();
        assert_eq!(code, "ae\"\"\"\"\"\"'j:&'kl\"\"b\"\"r#p\"\"");
        let comments: Vec<&str> = source.comments.split_whitespace().collect();
        assert_eq!(comments, ["/*", "b", "/*", "c", "*/", "d", "*/", "//", "f"]);
    }

    #[test]
    fn tests_are_told_from_the_product() {
        let text = "fn a() {}\n#[cfg(test)]\nmod fuzz;\n#[cfg(not(test))]\nfn b() {}\n\
            #[cfg(all(test, unix))]\n#[expect(x)]\nmod tests {\n    fn c() {}\n}\nfn d() {}\n";
        let source = parse(text);
        let tests: Vec<usize> = (1..=11).filter(|&line| source.is_test_line(line)).collect();
        assert_eq!(tests, [2, 3, 6, 7, 8, 9, 10]);
        assert_eq!(source.test_modules, ["fuzz"]);
        assert_eq!(source.product_lines(), 4);
    }

    #[test]
    fn functions_are_measured() {
        let text = "fn a<F: Fn(u8) -> u8>(&mut self, f: F, [x, y]: [u8; 2]) -> [u8; 2]\n\
            where\n    F: Copy,\n{\n    let g: fn(u8);\n}\n\
            fn b(self: &Self, m: Map<u8, u8>,);\n$fn $name() {}\n";
        let found = parse(text).functions();
        let brief = |f: &Function| (f.name.clone(), f.line, f.lines, f.params, f.has_body);
        let found: Vec<_> = found.iter().map(brief).collect();
        assert_eq!(found, [("a".into(), 1, 6, 2, true), ("b".into(), 7, 1, 1, false)]);
    }

    #[test]
    fn paths_are_found_inside_groups() {
        let text =
            "use std::{\n    env::{self, var},\n    fs,\n};\nlet x = std::fs::read;\nmystd::fs;\n";
        let source = parse(text);
        assert_eq!(source.lines_naming("std::fs"), [3, 5]);
        assert_eq!(source.lines_naming("std::env"), [2]);
        assert_eq!(source.lines_naming("std::thread"), [0; 0]);
    }
}
