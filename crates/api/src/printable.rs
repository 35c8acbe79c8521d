//! Text from data on a terminal: keys, file names and values of files are untrusted, and a terminal executes control sequences.

use std::borrow::Cow;

/// Escapes the control characters of a text, except for line ends.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |letter| letter.is_control() && letter != '\n')
}

/// Escapes the control characters of a text that is one line, line ends included.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escape(text, char::is_control)
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let escaped =
        |letter: char| if is_escaped(letter) { letter.escape_default().to_string() } else { letter.to_string() };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Replaces the control characters of a text by as many `?` as they have bytes, so that positions in it stay valid; line ends and
/// tabs stay.
pub(crate) fn printable_in_place(text: &str) -> Cow<'_, str> {
    let is_replaced = |letter: char| letter.is_control() && !matches!(letter, '\n' | '\r' | '\t');
    if !text.contains(is_replaced) {
        return Cow::Borrowed(text);
    }
    let replaced = |letter: char| if is_replaced(letter) { "?".repeat(letter.len_utf8()) } else { letter.to_string() };
    Cow::Owned(text.chars().map(replaced).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("\u{1b}[31mred\u{7}\nnext"), "\\u{1b}[31mred\\u{7}\nnext");
        assert_eq!(printable_line("a\nb\tc\u{9b}"), "a\\nb\\tc\\u{9b}");
        assert!(matches!(printable_line("\u{e4}rger"), Cow::Borrowed(_)));
        let text = "a: \u{1b}[0m\u{9b}\n";
        assert_eq!(printable_in_place(text), "a: ?[0m??\n");
        assert_eq!(printable_in_place(text).len(), text.len());
    }
}
