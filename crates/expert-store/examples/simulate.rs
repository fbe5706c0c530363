//! Prints the hit rates of eviction policies over generated traces, or over the files named.
//!
//! `cargo run --release -p snowmelt-expert-store --example simulate [TRACE ...]`

use snowmelt_expert_store::sim::{Trace, TraceSpec, candidates, compare};

const CAPACITIES: [f64; 3] = [0.10, 0.25, 0.50];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<_> = std::env::args_os().skip(1).collect();
    for file in &files {
        let trace = Trace::parse(&std::fs::read(file)?)?;
        table(&file.display().to_string(), &trace);
    }
    if files.is_empty() {
        for (name, spec) in generated() {
            table(name, &spec.generate());
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "it is what the example is for")]
fn table(name: &str, trace: &Trace) {
    println!("## {name}");
    println!(
        "{} layers, {} experts, {} steps, {} accesses",
        trace.n_layers(),
        trace.n_experts(),
        trace.n_steps(),
        trace.accesses()
    );
    println!("{}", compare(trace, &CAPACITIES, &candidates()));
}

fn generated() -> Vec<(&'static str, TraceSpec)> {
    let spec = TraceSpec::default();
    vec![
        ("uniform", spec),
        ("skewed, s = 1", TraceSpec { skew: 1.0, ..spec }),
        ("skewed, s = 1.2 to 2.4 by layer", TraceSpec { skew: 1.8, spread: 0.33, ..spec }),
        ("skewed, s = 1.8", TraceSpec { skew: 1.8, ..spec }),
        ("repeating, r = 0.3, else uniform", TraceSpec { repeat: 0.3, ..spec }),
        ("repeating, r = 0.25, s = 1", TraceSpec { repeat: 0.25, skew: 1.0, ..spec }),
        (
            "topics of 150 tokens, s = 1.8, r = 0.1",
            TraceSpec { repeat: 0.1, skew: 1.8, topic_steps: 150, ..spec },
        ),
    ]
}
