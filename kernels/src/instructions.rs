//! Which vector instructions passes use, chosen at run time.

use std::fmt;

/// The most that a device may use of the processor; what the processor lacks is never used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Instructions {
    /// All that this build knows and the processor has.
    #[default]
    Widest,
    /// At most AVX2.
    Avx2,
    /// What every processor of the architecture has.
    Portable,
}

/// Instructions that this processor has. Only [`Level::of`] makes one, so that holding one is the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// F, BW, DQ and VL, and all of [`Set::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// With BMI 1 and 2, F16C, FMA, LZCNT and POPCNT, which came with it.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Level {
    /// The widest that the processor has within `most`.
    pub(crate) fn of(most: Instructions) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = most != Instructions::Portable
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            let avx512 = avx2
                && most == Instructions::Widest
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match (avx512, avx2) {
                (true, _) => return Self(Set::Avx512),
                (_, true) => return Self(Set::Avx2),
                _ => {}
            }
        }
        let _ = most;
        Self(Set::Portable)
    }

    pub(crate) const fn set(self) -> Set {
        self.0
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "AVX2",
            Set::Portable => "no wide vectors",
        })
    }
}

/// Compiles a function of plain loops once per [`Set`]; the copy that the first argument names is called.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code, clippy::too_many_arguments)]
        $vis fn $name(level: $crate::instructions::Level, $($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn plain($($arg: $type),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512($($arg: $type),*) $(-> $out)? { plain($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2($($arg: $type),*) $(-> $out)? { plain($($arg),*) }

            match level.set() {
                // SAFETY: the level says that the processor has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::instructions::Set::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::instructions::Set::Avx2 => unsafe { avx2($($arg),*) },
                $crate::instructions::Set::Portable => plain($($arg),*),
            }
        }
    };
}
pub(crate) use dispatch;
