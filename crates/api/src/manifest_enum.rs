//! Fieldless enums of a manifest and their two spellings.
//!
//! A manifest writes `SoloDurable`, the command line `solo-durable`. Both derive from the variant's name.

/// A fieldless enum of a manifest.
pub trait ManifestEnum: Copy + PartialEq + 'static {
    /// All values, in the order of the documentation.
    const ALL: &'static [Self];

    /// Returns the spelling in manifests: `SoloDurable`.
    fn as_str(self) -> &'static str;

    /// Returns the spelling on the command line: `solo-durable`.
    fn kebab(self) -> String {
        let mut kebab = String::new();
        for (index, letter) in self.as_str().char_indices() {
            if letter.is_ascii_uppercase() && index > 0 {
                kebab.push('-');
            }
            kebab.push(letter.to_ascii_lowercase());
        }
        kebab
    }

    /// Parses the command line's spelling; `None` for an unknown value.
    fn from_kebab(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|word| word.kebab() == text)
    }
}

/// Declares a fieldless enum with the derives and the [`ManifestEnum`] implementation that every enum of a manifest has.
macro_rules! words {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$variant_meta:meta])* $variant:ident,)+ }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        $(#[$meta])*
        pub enum $name { $($(#[$variant_meta])* $variant,)+ }

        impl crate::manifest_enum::ManifestEnum for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn as_str(self) -> &'static str {
                match self { $(Self::$variant => stringify!($variant),)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(crate::manifest_enum::ManifestEnum::as_str(*self))
            }
        }
    };
}
pub(crate) use words;

#[cfg(test)]
mod tests {
    use super::ManifestEnum;
    use crate::{GpuMode, SoloPolicy};

    #[test]
    fn the_command_line_spells_values_in_kebab_case() {
        assert_eq!(SoloPolicy::SoloDurable.kebab(), "solo-durable");
        assert_eq!(SoloPolicy::from_kebab("min-isr"), Some(SoloPolicy::MinIsr));
        assert_eq!(GpuMode::from_kebab("Required"), None);
    }
}
