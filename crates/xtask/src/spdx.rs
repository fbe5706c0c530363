//! SPDX licence expressions, as far as crates use them.

use anyhow::{Result, bail, ensure};

/// Whether `expression` can be satisfied with licences of `allowed`. `X WITH Y` is one licence.
///
/// # Errors
/// When it is no expression.
pub(crate) fn satisfied(expression: &str, allowed: &[String]) -> Result<bool> {
    // Crates of old write `MIT/Apache-2.0`.
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let holds = any_of(&mut rest, allowed)?;
    ensure!(rest.is_empty(), "`{expression}` does not end where it should");
    Ok(holds)
}

fn any_of(rest: &mut &[&str], allowed: &[String]) -> Result<bool> {
    let mut holds = all_of(rest, allowed)?;
    while let [first, tail @ ..] = *rest
        && *first == "OR"
    {
        *rest = tail;
        holds |= all_of(rest, allowed)?;
    }
    Ok(holds)
}

fn all_of(rest: &mut &[&str], allowed: &[String]) -> Result<bool> {
    let mut holds = one(rest, allowed)?;
    while let [first, tail @ ..] = *rest
        && *first == "AND"
    {
        *rest = tail;
        holds &= one(rest, allowed)?;
    }
    Ok(holds)
}

fn one(rest: &mut &[&str], allowed: &[String]) -> Result<bool> {
    match *rest {
        ["(", tail @ ..] => {
            *rest = tail;
            let holds = any_of(rest, allowed)?;
            let [")", tail @ ..] = *rest else { bail!("a parenthesis is not closed") };
            *rest = tail;
            Ok(holds)
        }
        [licence, "WITH", exception, tail @ ..] => {
            *rest = tail;
            Ok(allowed.contains(&format!("{licence} WITH {exception}")))
        }
        [licence, tail @ ..] if !["OR", "AND", "WITH", ")"].contains(licence) => {
            *rest = tail;
            Ok(allowed.iter().any(|name| name == licence))
        }
        _ => bail!("a licence is missing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(expression: &str) -> bool {
        let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        satisfied(expression, &allowed).expect(expression)
    }

    #[test]
    fn or_needs_one_and_and_needs_all() {
        assert!(holds("MIT") && holds("GPL-3.0 OR MIT") && holds("GPL-3.0/MIT"));
        assert!(!holds("GPL-3.0") && !holds("MIT AND GPL-3.0"));
        assert!(holds("MIT AND (GPL-3.0 OR Zlib)"));
        assert!(!holds("GPL-3.0 AND MIT OR GPL-2.0"), "AND binds more tightly than OR");
        assert!(holds("GPL-3.0 AND GPL-2.0 OR MIT"));
    }

    #[test]
    fn an_exception_belongs_to_its_licence() {
        assert!(holds("Apache-2.0 WITH LLVM-exception"));
        assert!(!holds("Apache-2.0") && !holds("MIT WITH LLVM-exception"));
    }

    #[test]
    fn nonsense_is_an_error() {
        for nonsense in ["", "MIT OR", "(MIT", "MIT)", "MIT Zlib", "OR MIT"] {
            assert!(satisfied(nonsense, &["MIT".to_owned()]).is_err(), "{nonsense}");
        }
    }
}
