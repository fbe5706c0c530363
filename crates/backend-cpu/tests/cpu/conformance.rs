//! The suite of `snowmelt_backend` on every instruction set, thread count and rounding.

use snowmelt_backend::conformance::{self, Bound, Tolerance};
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions, Isa};

/// What is allowed of the suite's own bounds: a single output in which terms cancel is measured
/// against [`Bound::FLOOR`], a tenth of what the rounding of its terms is relative to, so its error
/// may be ten times as great, and the square a hundred times.
fn bounds(activations: Activations) -> Tolerance {
    let loose = |tolerance: Tolerance, nmse| {
        let products = Bound { nmse, ..tolerance.products };
        Tolerance { products, ..tolerance }
    };
    match activations {
        Activations::F32 => Tolerance::f32(),
        Activations::Auto => loose(Tolerance::i16(), 2e-7),
        // These round beside every weight, not only beside quantised ones.
        Activations::I16 => loose(Tolerance::i16(), 2e-7).everywhere(),
        Activations::I8 => loose(Tolerance::i8(), 4e-3).everywhere(),
    }
}

fn hold(isa: Isa, threads: usize, activations: Activations) {
    let options = CpuOptions {
        threads,
        activations,
        isa: isa.choice(),
        poison: threads == 2,
        ..CpuOptions::default()
    };
    let backend = CpuBackend::new(options).expect("an instruction set that was found");
    println!("{backend:?}");
    conformance::run(&backend, &bounds(activations)).assert_ok();
}

#[test]
fn the_best_instruction_set_conforms_in_every_mode() {
    let best = Isa::available().next().expect("scalar at least");
    // That threads change no bit is tested by itself.
    for (activations, threads) in Activations::ALL.into_iter().zip([2, 1, 3, 2]) {
        hold(best, threads, activations);
    }
}

#[test]
fn the_other_instruction_sets_conform() {
    for isa in Isa::available().skip(1) {
        for (activations, threads) in Activations::ALL.into_iter().zip([1, 3, 2, 2]) {
            hold(isa, threads, activations);
        }
    }
}
