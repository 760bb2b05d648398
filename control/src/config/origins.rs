//! Where the words that concern the daemon as a whole were said: a message about one names its place.

use std::collections::BTreeMap;
use toml::de::DeTable;

/// The places of words in a file; those that it does not have were said on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<String, String>);

impl Origins {
    /// Of the words at the top of a file; `at` makes a place of an offset in it.
    pub(super) fn of(text: &str, at: impl Fn(usize) -> String) -> Self {
        let Ok(table) = DeTable::parse(text) else { return Self::default() };
        let words = table.get_ref().keys();
        Self(words.map(|word| (word.get_ref().to_string(), at(word.span().start))).collect())
    }

    /// An option was given, which wins over the file.
    pub(super) fn overrule(&mut self, word: &str) {
        self.0.remove(word);
    }

    /// `disks.toml, line 3: cpus`, or `--cpus`.
    pub fn name(&self, word: &str) -> String {
        match self.0.get(word) {
            Some(place) => format!("{place}: {word}"),
            None => format!("--{word}"),
        }
    }

    /// `disks.toml, line 3: `, of the first of these words that the file has, or nothing.
    pub fn lead(&self, words: &[&str]) -> String {
        let place = words.iter().find_map(|word| self.0.get(*word));
        place.map(|place| format!("{place}: ")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_place_where_they_were_said() {
        let text = "cpus = '0'\n\n# user = 'a'\nuser = 'b'\n[[disk]]\ncontrol = 'c'\n";
        let line = |offset: usize| format!("f, line {}", text[..offset].matches('\n').count() + 1);
        let mut origins = Origins::of(text, line);
        assert_eq!(origins.name("cpus"), "f, line 1: cpus");
        assert_eq!(origins.name("user"), "f, line 4: user");
        assert_eq!(origins.name("control"), "--control");
        assert_eq!(origins.lead(&["metrics", "user"]), "f, line 4: ");
        assert_eq!(origins.lead(&["metrics"]), "");
        origins.overrule("user");
        assert_eq!(origins.name("user"), "--user");
    }
}
