//! Equal bits whatever the instructions and the threads.

use crate::workload::{Results, Workload};
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions, Isa, IsaChoice};

fn results(isa: IsaChoice, threads: usize, activations: Activations) -> Results {
    let options = CpuOptions { threads, activations, isa, ..CpuOptions::default() };
    Workload::run(&CpuBackend::new(options).expect("an instruction set that was found"))
}

fn assert_equal(wanted: &Results, found: &Results, what: &str) {
    assert_eq!(wanted.len(), found.len());
    for ((name, wanted), (_, found)) in wanted.iter().zip(found) {
        let differs =
            |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        let first = wanted.iter().zip(found).position(differs);
        if let Some(i) = first {
            panic!("{name} with {what}: element {i} is {:e}, not {:e}", found[i], wanted[i]);
        }
    }
}

#[test]
fn instruction_sets_agree_with_scalar_in_every_bit() {
    for activations in Activations::ALL {
        let wanted = results(IsaChoice::Scalar, 1, activations);
        let finite = |(name, values): &(String, Vec<f32>)| {
            let ids = name.ends_with(" ids");
            assert!(ids || values.iter().all(|x| x.is_finite()), "{name} is not finite");
        };
        wanted.iter().for_each(finite);
        for isa in Isa::available() {
            println!("{isa} against scalar, activations {activations}");
            let found = results(isa.choice(), 1, activations);
            assert_equal(&wanted, &found, &format!("{isa}, activations {activations}"));
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for activations in [Activations::Auto, Activations::I8] {
        let wanted = results(IsaChoice::Auto, 1, activations);
        for threads in [2, 3, 5] {
            let found = results(IsaChoice::Auto, threads, activations);
            assert_equal(&wanted, &found, &format!("{threads} threads"));
        }
    }
}

#[test]
fn experts_agree_whether_they_arrive_or_reside() {
    let all = results(IsaChoice::Auto, 2, Activations::Auto);
    let resident: Vec<usize> = (0..all.len()).filter(|i| all[*i].0 == "moe_ffn resident").collect();
    assert_eq!(resident.len(), 3);
    for i in resident {
        assert_eq!(all[i - 1].1, all[i].1, "{}", all[i - 1].0);
    }
}
