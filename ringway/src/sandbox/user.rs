//! Another user to run as.

use anyhow::{Context, anyhow, bail};
use nix::unistd;
use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use std::fmt;

/// A user with a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    word: String,
    user: Uid,
    group: Gid,
}

impl Account {
    /// `USER` or `USER:GROUP`, by names or numbers.
    ///
    /// # Errors
    /// That there is no such user or group, or that this process may not become it.
    pub(crate) fn find(word: &str) -> anyhow::Result<Self> {
        let (user, group) = match word.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (word, None),
        };
        let known = known_user(user)?;
        let number = match &known {
            Some(user) => user.uid.as_raw(),
            None => user.parse().map_err(|_| {
                anyhow!(
                    "there is no user '{user}'. Name one of this host, or give numbers, USER:GROUP"
                )
            })?,
        };
        let group = match (group, &known) {
            (Some(group), _) => group_number(group)?,
            (None, Some(user)) => user.gid.as_raw(),
            (None, None) => bail!(
                "user {user} has no entry on this host, so its group is not known: say {user}:GROUP"
            ),
        };
        if number == u32::MAX || group == u32::MAX {
            bail!("{} is not the number of a user or group", u32::MAX);
        }
        let (user, group) = (Uid::from_raw(number), Gid::from_raw(group));
        let itself = (geteuid(), getegid()) == (user, group);
        if !geteuid().is_root() && !itself {
            bail!(
                "only root can become another user, and this is user {}. Leave the option out, or \
                 start as root",
                geteuid().as_raw()
            );
        }
        if user.is_root() {
            bail!("becoming root gives nothing up. Name a user who has few rights");
        }
        Ok(Self { word: word.to_owned(), user, group })
    }

    /// Gives up all other identities and all capabilities, for this thread and those it starts.
    ///
    /// # Errors
    /// What the host says; the process should end then.
    pub(crate) fn become_it(&self) -> anyhow::Result<()> {
        let become_it = || -> rustix::io::Result<()> {
            if geteuid().is_root() {
                set_thread_groups(&[])?;
                set_thread_res_gid(self.group, self.group, self.group)?;
                set_thread_res_uid(self.user, self.user, self.user)?;
            }
            let none = CapabilitySet::empty();
            set_capabilities(
                None,
                CapabilitySets { effective: none, permitted: none, inheritable: none },
            )
        };
        become_it().with_context(|| format!("--user {self}: cannot become this user"))?;
        if set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() {
            bail!("--user {self}: the way back to root is still open");
        }
        Ok(())
    }

    /// The numbers of user and group.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.user.as_raw(), self.group.as_raw())
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word)
    }
}

/// The entry of a user, by name, or by number if no name is like it.
fn known_user(word: &str) -> anyhow::Result<Option<unistd::User>> {
    let cannot = || format!("cannot look for user '{word}'");
    if let Some(user) = unistd::User::from_name(word).with_context(cannot)? {
        return Ok(Some(user));
    }
    let Ok(number) = word.parse() else { return Ok(None) };
    unistd::User::from_uid(unistd::Uid::from_raw(number)).with_context(cannot)
}

fn group_number(word: &str) -> anyhow::Result<u32> {
    let group = unistd::Group::from_name(word);
    let group = group.with_context(|| format!("cannot look for group '{word}'"))?;
    match group {
        Some(group) => Ok(group.gid.as_raw()),
        None => word.parse().map_err(|_| {
            anyhow!("there is no group '{word}'. Name one of this host, or give its number")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        if !geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let nobody = Account::find("nobody").unwrap();
        assert_eq!(nobody, Account { word: "nobody".into(), ..Account::find("nobody").unwrap() });
        assert_eq!(nobody.numbers().0, 65534);
        assert_eq!(Account::find("65534").unwrap().numbers(), nobody.numbers());
        assert_eq!(Account::find("54321:12345").unwrap().numbers(), (54321, 12345));
        assert_eq!(Account::find("nobody:root").unwrap().numbers(), (65534, 0));
    }

    #[test]
    fn mistakes_are_told() {
        for (word, what) in [
            ("no-such-user", "there is no user 'no-such-user'"),
            ("", "there is no user ''"),
            ("nobody:no-such-group", "there is no group 'no-such-group'"),
            ("54321", "say 54321:GROUP"),
            ("4294967295:0", "is not the number of"),
            ("-1:0", "there is no user '-1'"),
        ] {
            let error = Account::find(word).unwrap_err().to_string();
            assert!(error.contains(what), "{word}: {error}");
        }
        let root = Account::find("root").unwrap_err().to_string();
        assert!(root.contains("gives nothing up") || root.contains("only root"), "{root}");
    }
}
