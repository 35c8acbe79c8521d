//! Words: the fieldless enums of a manifest and their two spellings.
//!
//! A manifest says `SoloDurable`, the command line says `solo-durable`. Both come from the variant's name, so they
//! cannot drift apart.

/// A fieldless enum of a manifest.
pub trait Word: Copy + PartialEq + 'static {
    /// Every word, in the order of the documentation.
    const ALL: &'static [Self];

    /// Returns the spelling of manifests: `SoloDurable`.
    fn word(self) -> &'static str;

    /// Returns the spelling of the command line: `solo-durable`.
    fn kebab(self) -> String {
        let mut kebab = String::new();
        for (index, letter) in self.word().char_indices() {
            if letter.is_ascii_uppercase() && index > 0 {
                kebab.push('-');
            }
            kebab.push(letter.to_ascii_lowercase());
        }
        kebab
    }

    /// Finds the word that the command line spells `text`; `None` where there is none.
    fn from_kebab(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|word| word.kebab() == text)
    }
}

/// Declares a fieldless enum with the derives and the [`Word`] implementation that every enum of a manifest has.
macro_rules! words {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$variant_meta:meta])* $variant:ident,)+ }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        $(#[$meta])*
        pub enum $name { $($(#[$variant_meta])* $variant,)+ }

        impl crate::word::Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn word(self) -> &'static str {
                match self { $(Self::$variant => stringify!($variant),)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(crate::word::Word::word(*self))
            }
        }
    };
}
pub(crate) use words;

#[cfg(test)]
mod tests {
    use super::Word;
    use crate::{GpuMode, SoloPolicy};

    #[test]
    fn the_command_line_spells_words_in_kebab_case() {
        assert_eq!(SoloPolicy::SoloDurable.kebab(), "solo-durable");
        assert_eq!(SoloPolicy::from_kebab("min-isr"), Some(SoloPolicy::MinIsr));
        assert_eq!(GpuMode::from_kebab("Required"), None);
    }
}
