//! Perplexity of a text.

use crate::engine::{Engine, Outputs};
use crate::error::{EngineError, Result};
use crate::sampler::nll;
use snowmelt_backend::Backend;

/// The mean over all predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Perplexity {
    /// Mean negative log-likelihood, in nats.
    pub mean_nll: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Windows measured.
    pub windows: usize,
    /// Predictions measured.
    pub predictions: usize,
    /// Tokens of the text.
    pub tokens: usize,
}

/// Windows of `window` tokens without overlap, each from an empty state; a shorter last one is
/// dropped. `progress(windows done, windows)` may end it early by returning false.
///
/// # Errors
/// When the text is shorter than a window, or a step fails.
pub fn perplexity<B: Backend>(
    engine: &mut Engine<B>,
    ids: &[u32],
    window: usize,
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Perplexity> {
    if window < 2 || ids.len() < window {
        return Err(EngineError::ShortText { got: ids.len(), window: window.max(2) });
    }
    let session = engine.session()?;
    let windows = ids.len() / window;
    let (mut sum, mut predictions, mut done) = (0.0, 0, 0);
    let rows = engine.plan().rows;
    for text in ids.chunks_exact(window) {
        engine.reset(session);
        let mut at = 0;
        for chunk in text.chunks(rows) {
            engine.step_one(session, chunk, Outputs::All, &mut |token, logits| {
                if let Some(&next) = text.get(at + token + 1) {
                    sum += nll(logits, next);
                    predictions += 1;
                }
            })?;
            at += chunk.len();
        }
        done += 1;
        if !progress(done, windows) {
            break;
        }
    }
    engine.close(session);
    let mean_nll = sum / predictions as f64;
    Ok(Perplexity {
        mean_nll,
        perplexity: mean_nll.exp(),
        windows: done,
        predictions,
        tokens: ids.len(),
    })
}
