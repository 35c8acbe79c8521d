//! Loops compiled once per vector width; the widest that the processor has is chosen at run time.

/// Compiles a function of plain loops for AVX-512, AVX2 and the baseline, and calls the widest that the processor has.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code)]
        $vis fn $name($($arg: $type),*) {
            #[inline(always)]
            fn plain($($arg: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $type),*) { plain($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) { plain($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            {
                let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
                if has_avx2
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the processor has every feature that the function enables.
                    return unsafe { avx512($($arg),*) };
                }
                if has_avx2 {
                    // SAFETY: the processor has every feature that the function enables.
                    return unsafe { avx2($($arg),*) };
                }
            }
            plain($($arg),*);
        }
    };
}
pub(crate) use widest;

/// The larger of two values without NaN, as one instruction: `f32::max` has a branch for NaN.
#[inline(always)]
pub(crate) const fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}
