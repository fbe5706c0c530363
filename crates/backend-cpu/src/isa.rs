//! Which instructions to use, decided once at open.

use std::fmt;

/// What the caller wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IsaChoice {
    /// The best that this machine has.
    #[default]
    Auto,
    /// No vector instructions: slow, and the same bits.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ, with VNNI where present.
    Avx512,
    /// NEON, the baseline of aarch64.
    Neon,
    /// AVX-512 without VNNI even where present, so that tests reach both.
    #[doc(hidden)]
    Avx512NoVnni,
}

/// What is used. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// No vector instructions.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// The same with VNNI.
    Avx512Vnni,
    /// NEON.
    Neon,
}

impl Isa {
    const ALL: [Self; 5] = [Self::Avx512Vnni, Self::Avx512, Self::Avx2, Self::Neon, Self::Scalar];

    /// Name, as `bench` prints it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Neon => "neon",
        }
    }

    /// What this machine has, the best first. The last is always [`Isa::Scalar`].
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The choice that selects exactly this one.
    pub const fn choice(self) -> IsaChoice {
        match self {
            Self::Scalar => IsaChoice::Scalar,
            Self::Avx2 => IsaChoice::Avx2,
            Self::Avx512 => IsaChoice::Avx512NoVnni,
            Self::Avx512Vnni => IsaChoice::Avx512,
            Self::Neon => IsaChoice::Neon,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        match self {
            Self::Scalar => true,
            Self::Avx2 => avx2,
            Self::Avx512 => avx512,
            Self::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
            Self::Neon => false,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn is_available(self) -> bool {
        // The target promises NEON.
        matches!(self, Self::Scalar | Self::Neon)
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn is_available(self) -> bool {
        self == Self::Scalar
    }

    /// Resolves a choice on this machine.
    pub(crate) fn resolve(choice: IsaChoice) -> Result<Self, CpuError> {
        let mut wanted = Self::available().filter(|isa| match choice {
            IsaChoice::Auto => true,
            IsaChoice::Scalar => *isa == Self::Scalar,
            IsaChoice::Avx2 => *isa == Self::Avx2,
            IsaChoice::Avx512 => matches!(isa, Self::Avx512 | Self::Avx512Vnni),
            IsaChoice::Avx512NoVnni => *isa == Self::Avx512,
            IsaChoice::Neon => *isa == Self::Neon,
        });
        wanted
            .next()
            .ok_or_else(|| CpuError::Isa { wanted: choice, found: Self::available().collect() })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why the backend could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// Instructions that this machine lacks.
    Isa {
        /// What was asked for.
        wanted: IsaChoice,
        /// What the machine has.
        found: Vec<Isa>,
    },
    /// A name of [`Activations`](crate::Activations) that does not exist.
    UnknownActivations {
        /// What was asked for.
        name: String,
    },
    /// The system refused a thread.
    Thread {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Isa { wanted, found } => {
                let wanted = format!("{wanted:?}").to_lowercase();
                write!(f, "this machine lacks the instructions `{wanted}`\nhint: it has")?;
                found.iter().try_for_each(|isa| write!(f, " `{isa}`"))
            }
            Self::UnknownActivations { name } => write!(
                f,
                "`{name}` is no rounding of activations\n\
                 hint: use one of `auto`, `f32`, `i16`, `i8`"
            ),
            Self::Thread { threads, .. } => write!(f, "cannot start `{threads}` threads"),
        }
    }
}

impl std::error::Error for CpuError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Isa { .. } | Self::UnknownActivations { .. } => None,
            Self::Thread { source, .. } => Some(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_resolve_to_what_is_there() {
        let best = Isa::resolve(IsaChoice::Auto).expect("scalar at least");
        assert_eq!(Some(best), Isa::available().next());
        for isa in Isa::available() {
            assert_eq!(Isa::resolve(isa.choice()).expect("available"), isa);
        }
    }

    #[test]
    fn a_missing_one_is_named_with_what_is_there() {
        let missing = if cfg!(target_arch = "aarch64") { IsaChoice::Avx2 } else { IsaChoice::Neon };
        let error = Isa::resolve(missing).expect_err("of another architecture").to_string();
        assert!(error.contains("`scalar`") && error.contains("lacks"), "{error}");
    }
}
