//! Sizes and counts as people write them.

pub(crate) use snowmelt_engine::Size as Bytes;
use std::fmt;
use std::str::FromStr;

/// A memory budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Memory {
    /// What the machine has to spare.
    Auto,
    /// So many bytes.
    Bytes(u64),
    /// A share of what the machine has to spare, above 0, at most 100.
    Percent(f64),
}

/// Why a size is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadSize(&'static str);

impl fmt::Display for BadSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for BadSize {}

const EXPECTED: BadSize =
    BadSize("expected a size such as `64GiB`, `300MiB`, `8GB`, `80%`, `auto`");
const TOO_LARGE: BadSize = BadSize("no machine has that much memory");

/// Bytes of a unit; the bare letters are powers of 1024, as system tools read them.
fn unit(name: &str) -> Option<u64> {
    let (base, power): (u64, u32) = match name.to_ascii_lowercase().as_str() {
        "" | "b" => (1, 0),
        "k" | "kib" => (1024, 1),
        "m" | "mib" => (1024, 2),
        "g" | "gib" => (1024, 3),
        "t" | "tib" => (1024, 4),
        "kb" => (1000, 1),
        "mb" => (1000, 2),
        "gb" => (1000, 3),
        "tb" => (1000, 4),
        _ => return None,
    };
    Some(base.pow(power))
}

impl FromStr for Memory {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, name) = text.split_at(digits);
        if number.is_empty() {
            return Err(EXPECTED);
        }
        let name = name.trim();
        if name == "%" {
            let percent: f64 = number.parse().map_err(|_| EXPECTED)?;
            let is_share = percent > 0.0 && percent <= 100.0;
            return if is_share {
                Ok(Self::Percent(percent))
            } else {
                Err(BadSize("expected a percentage above 0 and at most 100"))
            };
        }
        let unit = unit(name).ok_or(EXPECTED)?;
        if !number.contains('.') {
            let number: u64 = number.parse().map_err(|_| TOO_LARGE)?;
            return number.checked_mul(unit).map(Self::Bytes).ok_or(TOO_LARGE);
        }
        let bytes = number.parse::<f64>().map_err(|_| EXPECTED)? * unit as f64;
        if bytes >= u64::MAX as f64 { Err(TOO_LARGE) } else { Ok(Self::Bytes(bytes as u64)) }
    }
}

/// The size of a cache: bytes, nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheSize(pub(crate) u64);

impl FromStr for CacheSize {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        match text.parse()? {
            Memory::Bytes(bytes) => Ok(Self(bytes)),
            Memory::Auto | Memory::Percent(_) => Err(BadSize("expected a size such as `64MiB`")),
        }
    }
}

/// A count in the unit that reads best: `30.2 M`.
pub(crate) fn count(n: u64) -> String {
    let value = n as f64;
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", value / 1e6),
        _ => format!("{:.1} B", value / 1e9),
    }
}

/// A count with its noun: `1 token`, `2 tokens`.
pub(crate) fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::{CacheSize, Memory, counted};

    #[test]
    fn sizes_are_read() {
        let bytes = |n| Ok(Memory::Bytes(n));
        for (text, wanted) in [
            ("auto", Ok(Memory::Auto)),
            ("0", bytes(0)),
            ("1", bytes(1)),
            ("123456", bytes(123_456)),
            ("12 B", bytes(12)),
            ("64GiB", bytes(64 << 30)),
            ("64 gib", bytes(64 << 30)),
            ("64G", bytes(64 << 30)),
            ("300MiB", bytes(300 << 20)),
            ("8GB", bytes(8_000_000_000)),
            ("2kB", bytes(2000)),
            ("2KiB", bytes(2048)),
            ("1.5GiB", bytes(3 << 29)),
            ("1TB", bytes(1_000_000_000_000)),
            ("80%", Ok(Memory::Percent(80.0))),
            ("12.5 %", Ok(Memory::Percent(12.5))),
        ] {
            assert_eq!(text.parse::<Memory>(), wanted, "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        let bad = [
            "",
            " ",
            "GiB",
            "-1",
            "1e9",
            "1..5GiB",
            "5 apples",
            "0%",
            "101%",
            "nan",
            "inf",
            ".",
            "99999999999999999999",
            "99999999TiB",
            "99999999.5TiB",
            "１GiB",
            "1 GiB extra",
        ];
        for text in bad {
            assert!(text.parse::<Memory>().is_err(), "{text}");
        }
        for text in ["auto", "50%", "x"] {
            assert!(text.parse::<CacheSize>().is_err(), "{text}");
        }
        assert_eq!("2MiB".parse(), Ok(CacheSize(2 << 20)));
    }

    #[test]
    fn things_are_counted() {
        assert_eq!(counted(0, "token"), "0 tokens");
        assert_eq!(counted(1, "token"), "1 token");
        assert_eq!(counted(2, "token"), "2 tokens");
    }
}
