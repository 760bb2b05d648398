//! Who may connect to a disk's socket.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Mode of a socket file; in words its octal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "Word", into = "String")]
pub struct SocketMode(u32);

/// As it is written in a file or a request.
#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Text(String),
    Number(#[allow(dead_code)] i64),
}

impl TryFrom<Word> for SocketMode {
    type Error = String;

    fn try_from(word: Word) -> Result<Self, String> {
        match word {
            Word::Text(text) => text.parse(),
            // A number's digits would be read as decimal ones.
            Word::Number(_) => Err("the mode of a socket is a text, such as \"0660\"".into()),
        }
    }
}

impl From<SocketMode> for String {
    fn from(mode: SocketMode) -> Self {
        mode.to_string()
    }
}

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let octal = word.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        let mode = u32::from_str_radix(word, 8).ok().filter(|_| octal);
        match mode {
            Some(mode) if mode > 0o777 => {
                Err(format!("'{word}' has more than rights to read, write and execute in it"))
            }
            // unix(7): to connect takes the right to write.
            Some(mode) if mode & 0o222 == 0 => {
                Err(format!("with '{word}' nobody could connect: that takes the right to write"))
            }
            Some(mode) => Ok(Self(mode)),
            None => Err(format!("'{word}' is not the mode of a file: give 0600, 0660 or 0666")),
        }
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// What was said about one socket, or about all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct SocketRule {
    /// Who may connect, as of a file.
    pub mode: Option<SocketMode>,
    /// A name or a number.
    pub group: Option<String>,
}

impl SocketRule {
    /// `self`, and where it says nothing `other`.
    pub fn or(self, other: &Self) -> Self {
        Self { mode: self.mode.or(other.mode), group: self.group.or_else(|| other.group.clone()) }
    }

    /// Puts the number of the group in place of its name: names are looked up in files, which cannot
    /// be read in the sandbox.
    ///
    /// # Errors
    /// That there is no such group.
    pub fn resolve<E: fmt::Display>(
        &mut self,
        number: impl Fn(&str) -> Result<u32, E>,
    ) -> Result<(), String> {
        if let Some(group) = &mut self.group {
            *group = number(group).map_err(|e| format!("socket-group: {e:#}"))?.to_string();
        }
        Ok(())
    }

    /// The mode and the group, for a daemon with or without `--user`.
    ///
    /// # Errors
    /// That the group is a name still.
    pub fn settle(&self, has_user: bool) -> Result<(u32, Option<u32>), String> {
        let group = self.group.as_deref().map(|group| {
            group.parse().map_err(|_| format!("socket-group: '{group}' is not a number"))
        });
        let group = group.transpose()?;
        // Whoever names a group means it to connect.
        let usual = if has_user || group.is_some() { 0o660 } else { 0o600 };
        Ok((self.mode.map_or(usual, |SocketMode(mode)| mode), group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_let_somebody_in() {
        let parse = |word: &str| word.parse::<SocketMode>();
        assert_eq!(parse("0660"), Ok(SocketMode(0o660)));
        assert_eq!(parse("600"), Ok(SocketMode(0o600)));
        assert_eq!(SocketMode(0o60).to_string(), "0060");
        for (word, what) in [
            ("", "is not the mode"),
            ("rw-rw----", "is not the mode"),
            ("0o660", "is not the mode"),
            ("+660", "is not the mode"),
            ("680", "is not the mode"),
            ("77777777777777", "is not the mode"),
            ("4660", "more than rights"),
            ("0444", "nobody could connect"),
        ] {
            let error = parse(word).unwrap_err();
            assert!(error.contains(what), "{word}: {error}");
        }
    }

    #[test]
    fn what_is_not_said_is_narrow() {
        let rule = |mode: Option<&str>, group: Option<&str>| SocketRule {
            mode: mode.map(|mode| mode.parse().unwrap()),
            group: group.map(str::to_owned),
        };
        assert_eq!(rule(None, None).settle(false), Ok((0o600, None)));
        assert_eq!(rule(None, None).settle(true), Ok((0o660, None)));
        assert_eq!(rule(None, Some("7")).settle(false), Ok((0o660, Some(7))));
        assert_eq!(rule(Some("0666"), Some("7")).settle(true), Ok((0o666, Some(7))));
        assert!(rule(None, Some("kvm")).settle(true).is_err());
        let (one, other) = (rule(Some("0600"), None), rule(Some("0666"), Some("7")));
        assert_eq!(one.or(&other), rule(Some("0600"), Some("7")));
        let mut named = rule(None, Some("kvm"));
        assert_eq!(named.resolve(|_| Err("none")), Err("socket-group: none".into()));
        named.resolve(|name| if name == "kvm" { Ok(36) } else { Err("none") }).unwrap();
        assert_eq!(named.settle(false), Ok((0o660, Some(36))));
    }
}
