//! What somebody meant who wrote a word that nobody knows.

/// How alike words have to be, from 0 to 1: as clap has it for options.
const ALIKE: f64 = 0.7;

/// The word most like `word`, if one is.
fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let alike = known.into_iter().map(|other| (strsim::jaro(word, other), other));
    let alike = alike.filter(|(how, _)| *how > ALIKE);
    alike.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, other)| other)
}

/// ` (did you mean 'iops'?)`, or nothing.
pub fn hint<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map(|meant| format!(" (did you mean '{meant}'?)")).unwrap_or_default()
}

/// A parser's message, with the word that was meant if it is of an unknown field or value, and without
/// the names that this program has for numbers.
pub(crate) fn with_hint(message: &str) -> String {
    for unknown in ["unknown field `", "unknown variant `"] {
        let word = message.strip_prefix(unknown).and_then(|rest| rest.split_once('`'));
        if let Some((word, rest)) = word {
            let known: Vec<_> = rest.split('`').skip(1).step_by(2).collect();
            let hint = hint(word, known.iter().copied());
            if unknown.contains("variant") {
                return format!("'{word}' is not one of {}{hint}", known.join(", "));
            }
            return format!("{unknown}{word}`{hint}{rest}");
        }
    }
    let choice = message.strip_prefix('\'').and_then(|rest| rest.split_once("' is not one of "));
    if let Some((word, choices)) = choice {
        return format!("{message}{}", hint(word, choices.split(", ")));
    }
    without_types(message)
}

fn without_types(message: &str) -> String {
    if message.contains("leading zero") {
        return format!("{message}; a mode is text between quotes: \"0660\"");
    }
    // What no number of this program holds, its parser reads as text.
    let huge =
        message.strip_prefix("invalid type: integer `").and_then(|rest| rest.split_once("` as "));
    if let Some((number, _)) = huge {
        return format!("{number} is too large a number");
    }
    let Some((left, wanted)) = message.rsplit_once("expected ") else { return message.to_owned() };
    let wanted = match wanted {
        "u8" | "u16" | "u32" | "u64" => "a whole number",
        "a nonzero u32" => "a whole number, at least 1",
        "a string" => "text between quotes",
        "a boolean" => "true or false",
        "a sequence" => {
            "several: disks stand in tables of their own, [[disk]], and lists in brackets, [\"a\"]"
        }
        other => other,
    };
    format!("{left}expected {wanted}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_that_was_meant_is_told() {
        let found = with_hint("unknown field `iosp`, expected one of `image`, `iops`, `bps`");
        let wanted =
            "unknown field `iosp` (did you mean 'iops'?), expected one of `image`, `iops`, `bps`";
        assert_eq!(found, wanted);
        for (found, wanted) in [
            (
                "unknown variant `hodl`, expected `report` or `hold`",
                "'hodl' is not one of report, hold (did you mean 'hold'?)",
            ),
            (
                "invalid type: string \"4\", expected u64",
                "invalid type: string \"4\", expected a whole number",
            ),
            (
                "invalid value: integer `0`, expected a nonzero u32",
                "invalid value: integer `0`, expected a whole number, at least 1",
            ),
            (
                "invalid type: integer `99999999999999999999` as i128, expected u64",
                "99999999999999999999 is too large a number",
            ),
            (
                "invalid type: integer `1`, expected a boolean",
                "invalid type: integer `1`, expected true or false",
            ),
            (
                "invalid type: map, expected a sequence",
                "invalid type: map, expected several: disks stand in tables of their own, [[disk]], and \
                 lists in brackets, [\"a\"]",
            ),
            (
                "unexpected leading zero, expected nothing",
                "unexpected leading zero, expected nothing; a mode is text between quotes: \"0660\"",
            ),
        ] {
            assert_eq!(with_hint(found), wanted);
        }
        for other in ["unknown field `xyz`, expected `image`", "invalid type", "unknown field `"] {
            assert_eq!(with_hint(other), other);
        }
    }
}
