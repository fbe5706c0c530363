//! The suite against what is known to be right.

use crate::deferred::Deferred;
use snowmelt_backend::conformance::{self, Report, Tolerance};
use snowmelt_backend::reference::Reference;

fn assert_complete(report: &Report) {
    report.assert_ok();
    assert!(report.cases > 300 && report.runs > 5 * report.cases, "{report:?}");
}

#[test]
fn the_reference_keeps_its_own_rules() {
    assert_complete(&conformance::run(&Reference, &Tolerance::f32()));
}

#[test]
fn a_deferred_backend_passes() {
    let approximate = Tolerance::f32().approximate();
    assert_complete(&conformance::run(&Deferred::new(2), &approximate));
}

#[test]
fn pins_dropped_early_are_seen() {
    let report = conformance::experts(&Deferred::dropping_pins_early(2), &Tolerance::f32());
    let seen = report.failures.iter().any(|f| f.to_string().contains("0 of 8 pins live before"));
    assert!(seen, "{:?}", report.failures);
}
