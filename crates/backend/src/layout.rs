//! What the bytes of an expert record mean.

use crate::verbs::Glu;
use snowmelt_weights::Encoding;
use std::ops::Range;

/// How the rows of a matrix follow one another in its record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// One after the other.
    #[default]
    Plain,
    /// Row `r` is row `first + step * r` of those that lie there.
    Strided {
        /// Stored row of row 0.
        first: usize,
        /// Stored rows from one row to the next.
        step: usize,
    },
    /// Column after column, `width` plain floats each, of which row `r` has number
    /// `first + step * r`.
    Transposed {
        /// Number of row 0 in a column.
        first: usize,
        /// Numbers from one row to the next.
        step: usize,
        /// Values of a stored column.
        width: usize,
    },
}

/// Where the scales of a matrix lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scales {
    /// In its rows, as the encoding says; or it has none.
    #[default]
    Inline,
    /// `mxfp4`: a row of exponents for each stored row, from this byte of the record on.
    Exponents {
        /// Byte offset in the record.
        offset: usize,
    },
    /// `fp8`: a row of floats for each block of 128 stored rows.
    Blocks {
        /// Byte offset in the record.
        offset: usize,
        /// Their encoding, a plain one.
        encoding: Encoding,
    },
}

/// Stored rows that share scales of [`Scales::Blocks`].
const BLOCK_ROWS: usize = 128;

/// One matrix of an expert record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Encoding of its rows.
    pub encoding: Encoding,
    /// Rows.
    pub d_out: usize,
    /// Columns.
    pub d_in: usize,
    /// Byte offset in the record.
    pub offset: usize,
    /// Order of its rows.
    pub order: Order,
    /// Place of its scales.
    pub scales: Scales,
}

/// The bytes of one matrix, wherever its record lies.
#[derive(Clone, Copy, Debug)]
pub struct MatrixBytes<'a> {
    /// Rows, or their codes.
    pub rows: &'a [u8],
    /// Scales that lie apart, else empty.
    pub scales: &'a [u8],
}

impl MatrixLayout {
    /// Rows one after the other, with their scales: as a packed container has them.
    pub const fn plain(encoding: Encoding, d_out: usize, d_in: usize, offset: usize) -> Self {
        let (order, scales) = (Order::Plain, Scales::Inline);
        Self { encoding, d_out, d_in, offset, order, scales }
    }

    /// Whether it is as [`Self::plain`] makes it.
    pub fn is_plain(&self) -> bool {
        (self.order, self.scales) == (Order::Plain, Scales::Inline)
    }

    /// Bytes of the matrix from its offset on: more than its own where it shares a region.
    pub fn bytes(&self) -> usize {
        match self.order {
            Order::Transposed { width, .. } => self.d_in * self.encoding.row_bytes(width),
            _ => self.stored_rows() * self.stored_row_bytes(),
        }
    }

    /// Stored rows up to its last.
    fn stored_rows(&self) -> usize {
        self.d_out.checked_sub(1).map_or(0, |last| self.stored_row(last) + 1)
    }

    fn stored_row(&self, row: usize) -> usize {
        match self.order {
            Order::Plain | Order::Transposed { .. } => row,
            Order::Strided { first, step } => first + step * row,
        }
    }

    fn stored_row_bytes(&self) -> usize {
        match self.scales {
            Scales::Inline => self.encoding.row_bytes(self.d_in),
            _ => self.encoding.code_bytes(self.d_in),
        }
    }

    /// Byte ranges in the record: of rows, and of scales that lie apart (else empty).
    pub fn regions(&self) -> [Range<usize>; 2] {
        let (rows, blocks) = (self.stored_rows(), self.d_in.div_ceil(self.encoding.group()));
        let scales = match self.scales {
            Scales::Inline => 0..0,
            Scales::Exponents { offset } => offset..offset + rows * blocks,
            Scales::Blocks { offset, encoding } => {
                offset..offset + rows.div_ceil(BLOCK_ROWS) * encoding.row_bytes(blocks)
            }
        };
        [self.offset..self.offset + self.bytes(), scales]
    }

    /// Decodes rows `range`, whatever order they lie in: the same bits as the same rows stored
    /// plainly.
    ///
    /// **Shapes.** `out: [range.len(), d_in] f32`
    ///
    /// # Panics
    /// If `bytes` are not what [`Self::regions`] says.
    pub fn decode_rows(&self, bytes: MatrixBytes<'_>, range: Range<usize>, out: &mut [f32]) {
        let d_in = self.d_in;
        assert_eq!(out.len(), range.len() * d_in, "{range:?} of {self:?}");
        if let Order::Transposed { first, step, width } = self.order {
            let first = first + step * range.start;
            return self.gather(bytes.rows, [first, step, width], range.len(), out);
        }
        let row_bytes = self.stored_row_bytes();
        for (row, out) in range.zip(out.chunks_exact_mut(d_in)) {
            let row = self.stored_row(row);
            let codes = &bytes.rows[row * row_bytes..][..row_bytes];
            match self.scales {
                Scales::Inline => self.encoding.decode_row(codes, out),
                Scales::Exponents { .. } => {
                    let blocks = d_in / self.encoding.group();
                    let scales = &bytes.scales[row * blocks..][..blocks];
                    let scale = |block: usize| Encoding::exponent(scales[block]);
                    self.encoding.decode_codes(codes, scale, out);
                }
                Scales::Blocks { encoding, .. } => {
                    let blocks = d_in.div_ceil(self.encoding.group());
                    let scale_bytes = encoding.row_bytes(blocks);
                    let scales = &bytes.scales[row / BLOCK_ROWS * scale_bytes..][..scale_bytes];
                    let each = encoding.row_bytes(1);
                    let scale = |block: usize| value(encoding, &scales[block * each..][..each]);
                    self.encoding.decode_codes(codes, scale, out);
                }
            }
        }
    }

    /// Copies rows `range` as they would be stored plainly.
    ///
    /// **Shapes.** `out: [range.len(), encoding.row_bytes(d_in)]`
    ///
    /// # Panics
    /// If `bytes` are not what [`Self::regions`] says.
    pub fn copy_rows(&self, bytes: MatrixBytes<'_>, range: Range<usize>, out: &mut [u8]) {
        let (d_in, row_bytes) = (self.d_in, self.encoding.row_bytes(self.d_in));
        assert_eq!(out.len(), range.len() * row_bytes, "{range:?} of {self:?}");
        let (stored_bytes, blocks) =
            (self.stored_row_bytes(), d_in.div_ceil(self.encoding.group()));
        for (row, out) in range.zip(out.chunks_exact_mut(row_bytes)) {
            if let Order::Transposed { first, step, width } = self.order {
                let each = self.encoding.row_bytes(1);
                for (c, out) in out.chunks_exact_mut(each).enumerate() {
                    let at = (c * width + first + step * row) * each;
                    out.copy_from_slice(&bytes.rows[at..at + each]);
                }
                continue;
            }
            let row = self.stored_row(row);
            let (codes, scales) = out.split_at_mut(stored_bytes);
            codes.copy_from_slice(&bytes.rows[row * stored_bytes..][..stored_bytes]);
            match self.scales {
                Scales::Inline => {}
                Scales::Exponents { .. } => {
                    scales.copy_from_slice(&bytes.scales[row * blocks..][..blocks]);
                }
                Scales::Blocks { encoding, .. } => {
                    let each = encoding.row_bytes(1);
                    let from = row / BLOCK_ROWS * blocks;
                    for (block, out) in scales.chunks_exact_mut(4).enumerate() {
                        let scale = &bytes.scales[(from + block) * each..][..each];
                        out.copy_from_slice(&value(encoding, scale).to_le_bytes());
                    }
                }
            }
        }
    }

    /// Some rows of a matrix that is stored transposed: each column has its part of them together.
    fn gather(&self, bytes: &[u8], [first, step, width]: [usize; 3], rows: usize, out: &mut [f32]) {
        let each = self.encoding.row_bytes(1);
        let columns = bytes.chunks_exact(width * each).take(self.d_in);
        assert_eq!(columns.len(), self.d_in, "bytes of {self:?}");
        for (c, column) in columns.enumerate() {
            for r in 0..rows {
                let at = (first + step * r) * each;
                out[r * self.d_in + c] = value(self.encoding, &column[at..at + each]);
            }
        }
    }
}

/// One value of a plain encoding.
fn value(encoding: Encoding, bytes: &[u8]) -> f32 {
    let mut value = [0.0];
    encoding.decode_row(bytes, &mut value);
    value[0]
}

/// What the bytes of a record mean: `down(f(gate x) * up x)`, each with its bias where the family
/// has them. Piece 0 is `gate`, 1 is `up`, 2 is `down`. It may differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertLayout {
    /// The nonlinearity.
    pub glu: Glu,
    /// `[d_expert, d_model]`
    pub gate: MatrixLayout,
    /// `[d_expert, d_model]`
    pub up: MatrixLayout,
    /// `[d_model, d_expert]`
    pub down: MatrixLayout,
    /// Added to the products, `[d_out, 1]` each, in a plain encoding.
    pub biases: Option<[MatrixLayout; 3]>,
}

impl ExpertLayout {
    /// The matrices in order.
    pub fn pieces(&self) -> [&MatrixLayout; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// The matrices and then the biases.
    pub fn all_pieces(&self) -> impl Iterator<Item = &MatrixLayout> {
        self.pieces().into_iter().chain(self.biases.iter().flatten())
    }

    /// Bytes of one record.
    pub fn record_bytes(&self) -> usize {
        self.all_pieces().flat_map(MatrixLayout::regions).map(|r| r.end).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Encoding::{Bf16, F8E4M3, F32, Mxfp4};

    /// Rows of `layout` in a record, decoded two at a time.
    fn decoded(layout: &MatrixLayout, record: &[u8]) -> Vec<f32> {
        let [rows, scales] = layout.regions().map(|region| &record[region]);
        let mut out = vec![f32::NAN; layout.d_out * layout.d_in];
        for (i, out) in out.chunks_mut(2 * layout.d_in).enumerate() {
            let range = 2 * i..2 * i + out.len() / layout.d_in;
            layout.decode_rows(MatrixBytes { rows, scales }, range, out);
        }
        // Rows copied to plain order decode to the same.
        let plain = MatrixLayout::plain(layout.encoding, layout.d_out, layout.d_in, 0);
        let mut copy = vec![0; plain.bytes()];
        layout.copy_rows(MatrixBytes { rows, scales }, 0..layout.d_out, &mut copy);
        let mut again = vec![f32::NAN; out.len()];
        let bytes = MatrixBytes { rows: &copy, scales: &[] };
        plain.decode_rows(bytes, 0..layout.d_out, &mut again);
        assert!(out.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{layout:?}");
        out
    }

    fn record(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 73 + i / 7) as u8 & 0xf7).collect()
    }

    #[test]
    fn transposed_turns_are_gathered() {
        let (d_out, d_in) = (5, 3);
        let stored: Vec<u16> = (0..d_in * 2 * d_out).map(|i| 0x3f80 + i as u16).collect();
        let bytes: Vec<u8> =
            [0u8; 6].into_iter().chain(stored.iter().flat_map(|v| v.to_le_bytes())).collect();
        for first in [0, 1] {
            let order = Order::Transposed { first, step: 2, width: 2 * d_out };
            let layout = MatrixLayout { order, ..MatrixLayout::plain(Bf16, d_out, d_in, 6) };
            for (i, got) in decoded(&layout, &bytes).into_iter().enumerate() {
                let (r, c) = (i / d_in, i % d_in);
                let wanted = stored[c * 2 * d_out + first + 2 * r];
                assert_eq!(got.to_bits(), u32::from(wanted) << 16, "{first} {r} {c}");
            }
        }
    }

    /// Codes and scales apart give what rows with their scales give.
    #[test]
    fn scales_apart_are_those_of_inline_rows() {
        let (rows, d_in) = (2 * 200, 160);
        let blocks = d_in / 32;
        let bytes = record(rows * (d_in / 2 + blocks));
        for first in [0, 1] {
            let layout = MatrixLayout {
                order: Order::Strided { first, step: 2 },
                scales: Scales::Exponents { offset: rows * d_in / 2 },
                ..MatrixLayout::plain(Mxfp4, rows / 2, d_in, 0)
            };
            let inline: Vec<u8> = (0..rows / 2)
                .flat_map(|r| {
                    let r = first + 2 * r;
                    let codes = &bytes[r * d_in / 2..][..d_in / 2];
                    [codes, &bytes[rows * d_in / 2 + r * blocks..][..blocks]].concat()
                })
                .collect();
            let plain = MatrixLayout::plain(Mxfp4, rows / 2, d_in, 0);
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(decoded(&layout, &bytes)), bits(decoded(&plain, &inline)));
        }
    }

    /// A part of a fused tensor that begins inside a block of rows takes the scales of that block.
    #[test]
    fn blocks_are_counted_in_stored_rows() {
        let (first, d_out, d_in) = (100, 70, 130);
        let (rows, codes) = (first + d_out, (first + d_out) * d_in);
        for encoding in [F32, Bf16] {
            let each = encoding.row_bytes(1);
            let mut bytes = vec![0x38; codes];
            for scale in [1.0, 2.0, 3.0, 4.0] {
                let mut encoded = vec![0; each];
                encoding.encode_row(&[scale], &mut encoded);
                bytes.extend(encoded);
            }
            let layout = MatrixLayout {
                order: Order::Strided { first, step: 1 },
                scales: Scales::Blocks { offset: codes, encoding },
                ..MatrixLayout::plain(F8E4M3, d_out, d_in, 0)
            };
            assert_eq!(layout.regions(), [0..rows * d_in, codes..codes + 4 * each]);
            for (i, got) in decoded(&layout, &bytes).into_iter().enumerate() {
                let (r, c) = (first + i / d_in, i % d_in);
                assert_eq!(got, (1 + r / 128 * 2 + c / 128) as f32, "{r} {c}");
            }
        }
    }
}
