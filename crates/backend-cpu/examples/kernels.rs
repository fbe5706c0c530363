//! Speed of `linear` by encoding, rounding of activations, threads and rows, beside a bare loop
//! that reads memory: `cargo run --release --example kernels [d_out d_in [MiB]] [encoding...]`.

use snowmelt_backend::{Backend, BufType, View};
use snowmelt_backend_cpu::{Activations, CpuBackend, CpuOptions, CpuWeight, memory_read_ceiling};
use snowmelt_weights::Encoding;
use std::time::{Duration, Instant};

/// Weights of one measurement, in MiB: more than any cache holds.
const MEMORY: usize = 200;

struct Bench {
    backend: CpuBackend,
    weights: Vec<CpuWeight>,
    shape: [usize; 2],
}

impl Bench {
    fn new(options: CpuOptions, encoding: Encoding, [d_out, d_in, mib]: [usize; 3]) -> Self {
        let backend = CpuBackend::new(options).expect("the backend opens");
        let mut row = vec![0; encoding.row_bytes(d_in)];
        let values: Vec<f32> = (0..d_in).map(|i| (i as f32 * 0.37).sin() * 0.02).collect();
        encoding.encode_row(&values, &mut row);
        let rows = row.repeat(d_out);
        let count = ((mib << 20) / rows.len()).max(1);
        let weights = (0..count).map(|_| {
            let mut weight = backend.alloc_weight(encoding, d_out, d_in);
            backend.fill_weight(&mut weight, 0, &rows);
            weight
        });
        let weights = weights.collect();
        Self { backend, weights, shape: [d_out, d_in] }
    }

    /// Seconds of one product with `n` rows: the best tenth of what fits into the time, since other
    /// programs can only make it slower.
    fn measure(&self, n: usize, time: Duration) -> f64 {
        let [d_out, d_in] = self.shape;
        let b = &self.backend;
        let (x, out) = (b.alloc(n * d_in, BufType::F32), b.alloc(n * d_out, BufType::F32));
        let mut p = b.begin();
        let values: Vec<f32> = (0..n * d_in).map(|i| (i as f32 * 0.11).cos()).collect();
        b.write(&mut p, &x, 0, &values);
        let mut seconds = Vec::new();
        let end = Instant::now() + time;
        for weight in self.weights.iter().cycle() {
            let begin = Instant::now();
            b.linear(&mut p, View::of(&x, d_in), weight, n, View::of(&out, d_out));
            seconds.push(begin.elapsed().as_secs_f64());
            if Instant::now() > end && seconds.len() > 2 {
                break;
            }
        }
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 10]
    }
}

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let shape = match sizes[..] {
        [d_out, d_in] => [d_out, d_in, MEMORY],
        [d_out, d_in, mib, ..] => [d_out, d_in, mib],
        _ => [2048, 2048, MEMORY],
    };
    let [d_out, d_in, _] = shape;
    let encodings: Vec<Encoding> =
        std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let encodings = if encodings.is_empty() { Encoding::ALL.to_vec() } else { encodings };
    println!("linear [n, {d_in}] x [{d_out}, {d_in}]");
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in if all == 1 { vec![1] } else { vec![1, all] } {
        for encoding in encodings.iter().copied() {
            for activations in [Activations::Auto, Activations::F32, Activations::I8] {
                if encoding.is_quantised() || activations == Activations::F32 {
                    report(threads, encoding, activations, shape);
                }
            }
        }
    }
}

fn report(threads: usize, encoding: Encoding, activations: Activations, shape: [usize; 3]) {
    let options = CpuOptions { threads, activations, ..CpuOptions::default() };
    let bench = Bench::new(options, encoding, shape);
    let [d_out, d_in, _] = shape;
    let bytes = (d_out * encoding.row_bytes(d_in)) as f64;
    let ceiling = memory_read_ceiling(threads, 0.3) / 1e9;
    let one = bytes / bench.measure(1, Duration::from_millis(400)) / 1e9;
    let share = 100.0 * one / ceiling;
    let flops = |n: usize| {
        let operations = (2 * n * d_out * d_in) as f64;
        operations / bench.measure(n, Duration::from_millis(300)) / 1e9
    };
    println!(
        "{threads} threads  {encoding:5}  {activations:4}  n=1 {one:5.1} GB/s of {ceiling:5.1} \
         ({share:3.0} %)  n=4 {:6.1}  n=32 {:6.1}  n=256 {:6.1} GFLOP/s",
        flops(4),
        flops(32),
        flops(256),
    );
}
