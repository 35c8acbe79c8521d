//! Vector instruction sets of passes, selected at run time.

use std::fmt;

/// The widest instruction set that a device may use; unsupported instructions are never used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Instructions {
    /// Everything that this build and the processor support.
    #[default]
    Widest,
    /// At most AVX2.
    Avx2,
    /// The baseline of the architecture.
    Portable,
}

/// Instruction set that this processor supports. Only [`Level::of`] creates one, so a value is proof of support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// F, BW, DQ and VL, and all of [`Set::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// With BMI 1 and 2, F16C, FMA, LZCNT and POPCNT, which accompany it.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Level {
    /// Returns the widest supported level within `most`.
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

/// Compiles a function of plain loops once per [`Set`]; the first argument selects the variant.
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
