//! Dates for `strftime_now`, in UTC and English.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A point in time, taken apart.
struct Civil {
    year: i64,
    month: usize,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    week_day: usize,
    year_day: i64,
    micros: u32,
}

/// Formats a time as Python's `datetime.strftime` does; unknown directives stay as they are.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    let civil = Civil::new(time);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match rest.next() {
            Some('-') => match rest.next() {
                Some(c) => out.push_str(&unpadded(civil.directive(c))),
                None => out.push_str("%-"),
            },
            Some(c) => out.push_str(&civil.directive(c)),
            None => out.push('%'),
        }
    }
    out
}

/// A field without leading zeros or spaces.
fn unpadded(field: String) -> String {
    if !field.starts_with(|c: char| c.is_ascii_digit() || c == ' ') {
        return field;
    }
    match field.trim_start_matches(['0', ' ']) {
        "" => "0".to_owned(),
        short => short.to_owned(),
    }
}

impl Civil {
    fn new(time: SystemTime) -> Self {
        let (seconds, micros) = match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => (after.as_secs() as i64, after.subsec_micros()),
            // Whole seconds before the epoch, rounded down.
            Err(error) => {
                let before = error.duration() + Duration::from_nanos(999_999_999);
                (-(before.as_secs() as i64), 0)
            }
        };
        let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // The calendar in eras of 400 years that begin on 1 March (Hinnant, `civil_from_days`).
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        // `of_year` counts from 1 March, which is day 59 or 60 of the year.
        let year_day = if month <= 2 { of_year - 306 } else { of_year + 59 + i64::from(leap) };
        Self {
            year,
            month: month as usize,
            day: of_year - (153 * from_march + 2) / 5 + 1,
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
            week_day: (days + 4).rem_euclid(7) as usize,
            year_day: year_day + 1,
            micros,
        }
    }

    fn directive(&self, c: char) -> String {
        let day_name = DAYS[self.week_day];
        let month_name = MONTHS[self.month - 1];
        let mut out = String::new();
        let written = match c {
            'Y' => write!(out, "{}", self.year),
            'y' => write!(out, "{:02}", self.year.rem_euclid(100)),
            'm' => write!(out, "{:02}", self.month),
            'B' => write!(out, "{month_name}"),
            'b' | 'h' => write!(out, "{}", &month_name[..3]),
            'd' => write!(out, "{:02}", self.day),
            'e' => write!(out, "{:2}", self.day),
            'j' => write!(out, "{:03}", self.year_day),
            'A' => write!(out, "{day_name}"),
            'a' => write!(out, "{}", &day_name[..3]),
            'w' => write!(out, "{}", self.week_day),
            'u' => write!(out, "{}", (self.week_day + 6) % 7 + 1),
            'H' => write!(out, "{:02}", self.hour),
            'I' => write!(out, "{:02}", (self.hour + 11) % 12 + 1),
            'p' => write!(out, "{}", if self.hour < 12 { "AM" } else { "PM" }),
            'M' => write!(out, "{:02}", self.minute),
            'S' => write!(out, "{:02}", self.second),
            'f' => write!(out, "{:06}", self.micros),
            'F' => return self.all("Y-m-d"),
            'T' | 'X' => return self.all("H:M:S"),
            'D' | 'x' => return self.all("m/d/y"),
            'R' => return self.all("H:M"),
            'c' => return self.all("a b e H:M:S Y"),
            // Python's `datetime.now()` has no time zone.
            'z' | 'Z' => return String::new(),
            '%' => write!(out, "%"),
            other => write!(out, "%{other}"),
        };
        // Writing to a string cannot fail.
        let _ = written;
        out
    }

    /// A compound: letters are directives, all else is itself.
    fn all(&self, parts: &str) -> String {
        parts
            .chars()
            .map(|c| match c {
                c if c.is_ascii_alphabetic() => self.directive(c),
                c => c.to_string(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;
    use std::time::{Duration, SystemTime};

    const FORMATS: [&str; 3] =
        ["%Y-%m-%d %y %b %B %a %A", "%j %e %-d %-m %w %u %F %D", "%H:%M:%S %I %p %T %R %% %Q %-H"];

    /// What Python's `datetime.fromtimestamp(t, UTC).strftime` makes of the formats.
    const PYTHON: &[(u64, [&str; 3])] = &[
        (
            0,
            [
                "1970-01-01 70 Jan January Thu Thursday",
                "001  1 1 1 4 4 1970-01-01 01/01/70",
                "00:00:00 12 AM 00:00:00 00:00 % %Q 0",
            ],
        ),
        (
            951_782_399,
            [
                "2000-02-28 00 Feb February Mon Monday",
                "059 28 28 2 1 1 2000-02-28 02/28/00",
                "23:59:59 11 PM 23:59:59 23:59 % %Q 23",
            ],
        ),
        (
            951_782_400,
            [
                "2000-02-29 00 Feb February Tue Tuesday",
                "060 29 29 2 2 2 2000-02-29 02/29/00",
                "00:00:00 12 AM 00:00:00 00:00 % %Q 0",
            ],
        ),
        (
            951_868_800,
            [
                "2000-03-01 00 Mar March Wed Wednesday",
                "061  1 1 3 3 3 2000-03-01 03/01/00",
                "00:00:00 12 AM 00:00:00 00:00 % %Q 0",
            ],
        ),
        (
            1_741_529_107,
            [
                "2025-03-09 25 Mar March Sun Sunday",
                "068  9 9 3 0 7 2025-03-09 03/09/25",
                "14:05:07 02 PM 14:05:07 14:05 % %Q 14",
            ],
        ),
        (
            4_107_542_399,
            [
                "2100-02-28 00 Feb February Sun Sunday",
                "059 28 28 2 0 7 2100-02-28 02/28/00",
                "23:59:59 11 PM 23:59:59 23:59 % %Q 23",
            ],
        ),
        (
            1_709_251_199,
            [
                "2024-02-29 24 Feb February Thu Thursday",
                "060 29 29 2 4 4 2024-02-29 02/29/24",
                "23:59:59 11 PM 23:59:59 23:59 % %Q 23",
            ],
        ),
        (
            32_503_680_000,
            [
                "3000-01-01 00 Jan January Wed Wednesday",
                "001  1 1 1 3 3 3000-01-01 01/01/00",
                "00:00:00 12 AM 00:00:00 00:00 % %Q 0",
            ],
        ),
    ];

    #[test]
    fn agrees_with_python() {
        for (seconds, expected) in PYTHON {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(*seconds);
            assert_eq!(FORMATS.map(|format| strftime(time, format)), *expected, "{seconds}");
        }
        let before = SystemTime::UNIX_EPOCH - Duration::from_millis(500);
        assert_eq!(strftime(before, "%Y-%m-%d %H:%M:%S"), "1969-12-31 23:59:59");
        assert_eq!(strftime(before, "%-"), "%-");
        assert_eq!(strftime(before, "100%"), "100%");
    }
}
