//! Frequencies of rotary position embeddings.

use crate::config::{Result, refuse};
use snowmelt_weights::ConfigView;

/// Rotary embedding of a family.
#[derive(Clone, Debug)]
pub(crate) struct Rotary {
    /// Dimensions of a head that are rotated; the rest pass through.
    pub(crate) d: usize,
    /// `[d / 2]`
    pub(crate) inv_freq: Vec<f32>,
    /// Factor of cosines and sines.
    pub(crate) scale: f32,
}

impl Rotary {
    /// Reads `rope_parameters`, or the older top-level `rope_theta`, `partial_rotary_factor` and
    /// `rope_scaling`.
    ///
    /// Source: transformers `modeling_rope_utils.py`.
    pub(crate) fn read(text: &ConfigView<'_>, d_head: usize, context_max: usize) -> Result<Self> {
        let partial = Self::number(text, "partial_rotary_factor")?.unwrap_or(1.0);
        Self::of(text, d_head, partial, context_max)
    }

    /// A field of `rope_parameters` or `rope_scaling`, else of the config itself.
    fn number(text: &ConfigView<'_>, key: &'static str) -> Result<Option<f64>> {
        for nested in ["rope_parameters", "rope_scaling"] {
            if let Some(nested) = text.opt_object(nested)? {
                if let Some(value) = nested.opt_f64(key)? {
                    return Ok(Some(value));
                }
                break;
            }
        }
        Ok(text.opt_f64(key)?)
    }

    /// The same where the rotated part of `d_head` is known.
    pub(crate) fn of(
        text: &ConfigView<'_>,
        d_head: usize,
        partial: f64,
        context_max: usize,
    ) -> Result<Self> {
        let nested = match text.opt_object("rope_parameters")? {
            Some(nested) => Some(nested),
            None => text.opt_object("rope_scaling")?,
        };
        let number = |key: &'static str| Self::number(text, key);
        let theta = theta(number("rope_theta")?)?;
        if !(partial > 0.0 && partial <= 1.0) {
            return refuse("partial_rotary_factor", partial, "above 0 and at most 1");
        }
        let d = (d_head as f64 * partial) as usize;
        if d == 0 || d % 2 == 1 {
            let found = format!("{partial} (rotating {d} of {d_head} dimensions)");
            return refuse("partial_rotary_factor", found, "an even number of dimensions");
        }
        let kind = match &nested {
            Some(nested) => nested.opt_str("rope_type")?.or(nested.opt_str("type")?),
            // The parameters of one kind of layers, by themselves.
            None => text.opt_str("rope_type")?,
        };
        let plain = frequencies(theta, d);
        let scaling = Scaling { number: &number, theta, d, context_max };
        match kind.unwrap_or("default") {
            "default" | "mrope" => Ok(Self { d, inv_freq: plain, scale: 1.0 }),
            "linear" => {
                let factor = scaling.factor()? as f32;
                let inv_freq = plain.iter().map(|f| f / factor).collect();
                Ok(Self { d, inv_freq, scale: 1.0 })
            }
            "yarn" => {
                let truncate = match &nested {
                    Some(nested) => nested.opt_bool("truncate")?.unwrap_or(true),
                    None => true,
                };
                scaling.yarn(&plain, truncate)
            }
            "llama3" => scaling.llama3(&plain),
            other => refuse("rope_type", other, "`default`, `linear`, `yarn` or `llama3`"),
        }
    }

    /// Gemma's proportional form: the frequencies of the whole head, of which the first
    /// `partial` turn and the others stand still.
    pub(crate) fn proportional(
        parameters: &ConfigView<'_>,
        d_head: usize,
        partial: f64,
    ) -> Result<Self> {
        let mut whole = Self::plain(parameters, d_head)?;
        let turning = (partial * d_head as f64 / 2.0) as usize;
        if !(0.0..=1.0).contains(&partial) {
            return refuse("partial_rotary_factor", partial, "0 to 1");
        }
        whole.inv_freq[turning..].fill(0.0);
        Ok(whole)
    }

    /// That of layers of one kind, where each has its own object in `rope_parameters`.
    pub(crate) fn of_kind(
        text: &ConfigView<'_>,
        kind: &str,
        d_head: usize,
        context_max: usize,
    ) -> Result<Self> {
        let parameters = match text.opt_object("rope_parameters")? {
            Some(all) => all.opt_object(kind)?,
            None => None,
        };
        let Some(parameters) = parameters else {
            return refuse("rope_parameters", "missing", format!("an object with `{kind}`"));
        };
        let partial = parameters.opt_f64("partial_rotary_factor")?.unwrap_or(1.0);
        match parameters.opt_str("rope_type")? {
            Some("proportional") => Self::proportional(&parameters, d_head, partial),
            _ => Self::of(&parameters, d_head, partial, context_max),
        }
    }

    /// Without any stretching, all of the head.
    fn plain(parameters: &ConfigView<'_>, d_head: usize) -> Result<Self> {
        let theta = theta(parameters.opt_f64("rope_theta")?)?;
        if d_head == 0 || d_head % 2 == 1 {
            return refuse("head_dim", d_head, "an even number");
        }
        Ok(Self { d: d_head, inv_freq: frequencies(theta, d_head), scale: 1.0 })
    }
}

fn theta(found: Option<f64>) -> Result<f64> {
    let theta = found.unwrap_or(10_000.0);
    if theta.is_finite() && theta > 1.0 {
        Ok(theta)
    } else {
        refuse("rope_theta", theta, "a number above 1")
    }
}

/// `theta^(-2i/d)`, each step rounded to f32 as the published models compute it.
fn frequencies(theta: f64, d: usize) -> Vec<f32> {
    let one = |i: usize| {
        let exponent = (2 * i) as f32 / d as f32;
        1.0 / theta.powf(f64::from(exponent)) as f32
    };
    (0..d / 2).map(one).collect()
}

struct Scaling<'a, N> {
    number: &'a N,
    theta: f64,
    d: usize,
    context_max: usize,
}

impl<N: Fn(&'static str) -> Result<Option<f64>>> Scaling<'_, N> {
    fn original(&self) -> Result<f64> {
        let original = (self.number)("original_max_position_embeddings")?;
        Ok(original.unwrap_or(self.context_max as f64))
    }

    fn factor(&self) -> Result<f64> {
        let factor = match (self.number)("factor")? {
            Some(factor) => factor,
            None => self.context_max as f64 / self.original()?,
        };
        if !(factor.is_finite() && factor >= 1.0) {
            return refuse("factor", factor, "a number that is at least 1");
        }
        Ok(factor)
    }

    /// `YaRN` (arXiv 2309.00071), as in transformers.
    fn yarn(&self, plain: &[f32], truncate: bool) -> Result<Rotary> {
        let (d, factor, original) = (self.d as f64, self.factor()?, self.original()?);
        let beta_fast = (self.number)("beta_fast")?.unwrap_or(32.0);
        let beta_slow = (self.number)("beta_slow")?.unwrap_or(1.0);
        let turns = |n: f64| {
            d * (original / (n * 2.0 * std::f64::consts::PI)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (turns(beta_fast), turns(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(d - 1.0));
        if high - low < 1e-3 {
            high = low + 1e-3;
        }
        let blend = |(i, &f): (usize, &f32)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let f = f64::from(f);
            (f / factor * ramp + f * (1.0 - ramp)) as f32
        };
        let inv_freq = plain.iter().enumerate().map(blend).collect();
        let mscale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let scale = match (self.number)("attention_factor")? {
            Some(explicit) => explicit,
            None => match ((self.number)("mscale")?, (self.number)("mscale_all_dim")?) {
                (Some(a), Some(b)) if a != 0.0 && b != 0.0 => mscale(a) / mscale(b),
                _ => mscale(1.0),
            },
        };
        Ok(Rotary { d: self.d, inv_freq, scale: scale as f32 })
    }

    fn llama3(&self, plain: &[f32]) -> Result<Rotary> {
        let (factor, original) = (self.factor()?, self.original()?);
        let low = (self.number)("low_freq_factor")?.unwrap_or(1.0);
        let high = (self.number)("high_freq_factor")?.unwrap_or(4.0);
        if !(low > 0.0 && high > low) {
            return refuse("high_freq_factor", high, format!("above `low_freq_factor` = {low}"));
        }
        let one = |&f: &f32| {
            let wavelength = 2.0 * std::f64::consts::PI / f64::from(f);
            if wavelength < original / high {
                f
            } else if wavelength > original / low {
                (f64::from(f) / factor) as f32
            } else {
                let s = (original / wavelength - low) / (high - low);
                ((1.0 - s) * f64::from(f) / factor + s * f64::from(f)) as f32
            }
        };
        Ok(Rotary { d: self.d, inv_freq: plain.iter().map(one).collect(), scale: 1.0 })
    }
}
