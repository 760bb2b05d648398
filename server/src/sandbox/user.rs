//! Another user to run as.

use anyhow::{Context, anyhow, bail};
use nix::errno::Errno;
use nix::unistd;
use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
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

    /// The same user with another group.
    pub(crate) fn with_group(&self, group: Option<u32>) -> Self {
        Self { group: group.map_or(self.group, Gid::from_raw), ..self.clone() }
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
        become_it().with_context(|| format!("cannot become the user {self}"))?;
        if set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() {
            bail!("the user {self}: the way back to root is still open");
        }
        Ok(())
    }

    /// From now on, what this thread makes belongs to this user from the first moment; it may still
    /// make it wherever it could before. There is no moment in which the file has its name and not
    /// its owner, so nobody can put another file in its place to be given away.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn own_what_is_made(&self) -> anyhow::Result<()> {
        let had = capabilities(None).context("cannot tell what this process may do")?;
        // SAFETY: they take numbers, and are for this thread alone. They tell no errors.
        unsafe {
            libc::syscall(libc::SYS_setfsgid, self.group.as_raw());
            libc::syscall(libc::SYS_setfsuid, self.user.as_raw());
        }
        // Those went with the number.
        let anywhere = CapabilitySet::DAC_OVERRIDE | CapabilitySet::FOWNER;
        let effective = had.effective & anywhere & had.permitted;
        set_capabilities(None, CapabilitySets { effective, ..had })
            .with_context(|| format!("cannot make files for {self}"))
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word)
    }
}

/// Does something with the rights of another user, if there is one: on a thread that gives its own up.
///
/// # Errors
/// That they cannot be given up, or that it has panicked.
pub(crate) fn acting_as<T: Send>(
    account: Option<&Account>,
    act: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    let Some(account) = account else { return Ok(act()) };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| account.become_it().map(|()| act()));
        thread.join().map_err(|_| anyhow!("the thread that acts for another user panicked"))?
    })
}

/// The entry of a user, by name, or by number if no name is like it.
fn known_user(word: &str) -> anyhow::Result<Option<unistd::User>> {
    let cannot = || format!("cannot look for user '{word}'");
    if let Some(user) = known(unistd::User::from_name(word)).with_context(cannot)? {
        return Ok(Some(user));
    }
    let Ok(number) = word.parse() else { return Ok(None) };
    known(unistd::User::from_uid(unistd::Uid::from_raw(number))).with_context(cannot)
}

/// A host without the file that lists them knows nobody, which is no failure (getpwnam(3)).
fn known<T>(found: nix::Result<Option<T>>) -> nix::Result<Option<T>> {
    match found {
        Err(Errno::ENOENT | Errno::ESRCH) => Ok(None),
        found => found,
    }
}

/// The number of a group, by its name or its number. Not to be called in the sandbox.
///
/// # Errors
/// That there is none.
pub fn group_number(word: &str) -> anyhow::Result<u32> {
    let group = known(unistd::Group::from_name(word));
    let group = group.with_context(|| format!("cannot look for group '{word}'"))?;
    let number = group.map_or_else(|| word.parse().ok(), |group| Some(group.gid.as_raw()));
    match number {
        // The kernel's word for leaving it as it is.
        Some(u32::MAX) => bail!("{} is not the number of a user or group", u32::MAX),
        Some(number) => Ok(number),
        None => bail!("there is no group '{word}'. Name one of this host, or give its number"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::{Need, skip};

    impl Account {
        fn numbers(&self) -> (u32, u32) {
            (self.user.as_raw(), self.group.as_raw())
        }
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        if !geteuid().is_root() {
            return skip(Need::Root, "to change the user");
        }
        let nobody = Account::find("nobody").unwrap();
        assert_eq!(nobody, Account { word: "nobody".into(), ..Account::find("nobody").unwrap() });
        assert_eq!(nobody.numbers().0, 65534);
        assert_eq!(Account::find("65534").unwrap().numbers(), nobody.numbers());
        assert_eq!(Account::find("54321:12345").unwrap().numbers(), (54321, 12345));
        assert_eq!(Account::find("nobody:root").unwrap().numbers(), (65534, 0));
    }

    #[test]
    fn a_host_without_lists_knows_nobody() {
        assert_eq!(known::<()>(Err(Errno::ENOENT)), Ok(None));
        assert_eq!(known(Ok(Some(1))), Ok(Some(1)));
        assert_eq!(known::<()>(Err(Errno::EIO)), Err(Errno::EIO));
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

    /// In a folder that is root's alone, so that the right to make it there is still root's.
    #[test]
    fn a_socket_is_born_with_its_owner() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        if !geteuid().is_root() {
            return skip(Need::Root, "to change the user");
        }
        let folder = tempfile::tempdir().unwrap();
        let closed = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(folder.path(), closed).unwrap();
        let path = folder.path().join("s");
        std::fs::write(folder.path().join("roots"), "").unwrap();
        let other = Account::find("54321:12345").unwrap();
        std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                other.own_what_is_made().unwrap();
                drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
                let meta = path.symlink_metadata().unwrap();
                assert_eq!((meta.uid(), meta.gid()), other.numbers());
                // Nobody is given anything: what is root's stays so.
                let roots = folder.path().join("roots");
                let refused = std::os::unix::fs::chown(&roots, Some(54321), None);
                assert!(refused.is_err());
            });
            made.join().unwrap();
        });
        // Only that thread.
        std::fs::write(folder.path().join("mine"), "").unwrap();
        assert_eq!(folder.path().join("mine").metadata().unwrap().uid(), 0);
    }
}
