//! `clear`, `write`, `copy` and host reads, against a plain vector.

use super::case::{Bench, Case, Suite, Way};
use super::data::Rng;
use super::report::Part;
use crate::verbs::{Backend, BufType, Pass};
use std::ops::Range;

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for len in [1, 7, 33, 200, 1000] {
        suite.check(&Script::new(len));
    }
}

enum Op {
    Clear(Range<usize>),
    Write(usize, Vec<f32>),
    Copy(usize, usize, usize),
    Submit,
}

/// A sequence of operations on one buffer.
struct Script {
    len: usize,
    ops: Vec<Op>,
    name: String,
}

impl Script {
    fn new(len: usize) -> Self {
        let name = format!("clear, write, copy in {len} elements");
        let mut rng = Rng::named(&name);
        let mut ops = vec![Op::Write(0, rng.normals(len, 1.0))];
        for _ in 0..40 {
            let from = rng.below(len);
            let some = 1 + rng.below((len - from).min(20));
            ops.push(match rng.below(4) {
                0 => Op::Clear(from..from + some),
                1 => Op::Write(from, rng.normals(some, 1.0)),
                2 => Op::Submit,
                _ => {
                    let to = rng.below(len);
                    let most = from.abs_diff(to).min(len - from.max(to));
                    Op::Copy(from, to, most.min(20))
                }
            });
        }
        Self { len, ops, name }
    }

    /// What a plain vector makes of it.
    fn modelled(&self) -> Vec<f32> {
        let mut values = vec![f32::NAN; self.len];
        for op in &self.ops {
            match op {
                Op::Clear(range) => values[range.clone()].fill(0.0),
                Op::Write(at, data) => values[*at..][..data.len()].copy_from_slice(data),
                Op::Copy(from, to, len) => values.copy_within(*from..from + len, *to),
                Op::Submit => {}
            }
        }
        values
    }
}

impl Case for Script {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ways(&self) -> Vec<Way> {
        vec![Way { exact: true, ..Way::variant(1, "read in pieces") }]
    }

    fn run<B: Backend>(&self, bench: &mut Bench<'_, B>, way: Way) -> Vec<Part> {
        let buf = bench.b.alloc(self.len, BufType::F32);
        let (b, p) = (bench.b, &mut bench.pass);
        for op in &self.ops {
            match op {
                Op::Clear(range) => b.clear(p, &buf, range.clone()),
                Op::Write(at, data) => b.write(p, &buf, *at, data),
                Op::Copy(from, to, len) => b.copy(p, &buf, *from, *to, *len),
                Op::Submit => p.submit(),
            }
        }
        let mut values = vec![f32::NAN; self.len];
        let piece = if way.variant == 1 { 3 } else { self.len };
        for (i, into) in values.chunks_mut(piece).enumerate() {
            let range = i * piece..i * piece + into.len();
            p.read(&buf, range, into).expect("the device works");
        }
        let wrong = self.modelled().iter().zip(&values).position(|(a, b)| a != b);
        if let Some(at) = wrong {
            bench.complaints.push(format!("element {at} is not what a plain vector would hold"));
        }
        vec![Part::exact("values", 1, values)]
    }
}
