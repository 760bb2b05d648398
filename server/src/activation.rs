//! Sockets that systemd, or another manager, opened for this program (sd_listen_fds(3)).
//!
//! A disk gets the socket that is bound where its `socket` says, so that one configuration file serves
//! with and without socket activation; who may connect, the manager has decided then. A single disk on
//! the command line may leave `--socket` out.

use crate::endpoint;
use anyhow::{Context, bail};
use ringway_control::config::{Place, Plan, SocketRule};
use std::fs::canonicalize;
use std::path::{Path, PathBuf};

/// The first descriptor that is passed: SD_LISTEN_FDS_START.
const FIRST: i32 = 3;

/// A socket that was passed.
struct Passed {
    place: Place,
    /// Where it is bound, and as what it was passed.
    path: PathBuf,
    name: String,
}

/// What the environment says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Announced {
    count: i32,
    names: Vec<String>,
}

/// Gives disks of `plan` the sockets that were passed to this process.
///
/// # Errors
/// A socket that is not a listening Unix stream socket, or at which no disk is served.
pub(crate) fn give_sockets(plan: &mut Plan) -> anyhow::Result<()> {
    let inherits = |place: &Place| matches!(place, Place::Inherited { .. });
    if plan.disks.iter().any(|disk| inherits(&disk.place)) {
        // By --fd or by `only_one`, which have taken theirs.
        return Ok(());
    }
    let Some(announced) = from_environment()? else { return Ok(()) };
    let mut passed = (0..announced.count)
        .map(|number| take(&announced, number))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for disk in &mut plan.disks {
        let Place::Socket(wanted) = &disk.place else { continue };
        let at = passed.iter().position(|socket| is_same(&socket.path, wanted));
        if let Some(at) = at {
            let socket = passed.swap_remove(at);
            disk.place = socket.place;
            disk.access = SocketRule::default();
        }
    }
    match passed.first() {
        None => Ok(()),
        Some(Passed { path, name, .. }) => bail!(
            "the socket {} was passed to this daemon (LISTEN_FDS, '{name}'), but no disk is served at \
             it. Name it as the socket of a disk, or do not pass it",
            path.display()
        ),
    }
}

/// The only socket that was passed, for a disk of the command line that has no `--socket`. `None` if
/// none was.
///
/// # Errors
/// That there are several, or that it is no such socket.
pub(crate) fn only_one() -> anyhow::Result<Option<Place>> {
    let Some(announced) = from_environment()? else { return Ok(None) };
    if announced.count != 1 {
        bail!(
            "{} sockets were passed to this daemon (LISTEN_FDS), for one disk. Name its own with \
             --socket, or serve a file of disks with --config",
            announced.count
        );
    }
    Ok(Some(take(&announced, 0)?.place))
}

fn from_environment() -> anyhow::Result<Option<Announced>> {
    let value = |name: &str| std::env::var(name).ok();
    announced(std::process::id(), &value)
}

/// What was passed to the process `own`, and not to one that started it.
fn announced(
    own: u32,
    value: &dyn Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<Announced>> {
    let (Some(pid), Some(count)) = (value("LISTEN_PID"), value("LISTEN_FDS")) else {
        return Ok(None);
    };
    if pid.parse() != Ok(own) {
        return Ok(None);
    }
    let count = count.parse().ok().filter(|count| (0..=1024).contains(count));
    let count = count.context("LISTEN_FDS is not the number of sockets that were passed")?;
    let names = value("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').map(str::to_owned).collect();
    Ok((count > 0).then_some(Announced { count, names }))
}

fn take(announced: &Announced, number: i32) -> anyhow::Result<Passed> {
    let fd = FIRST + number;
    let name = usize::try_from(number).ok().and_then(|at| announced.names.get(at));
    let name = name.filter(|name| !name.is_empty()).cloned().unwrap_or_else(|| format!("{fd}"));
    let place = endpoint::inherit(fd).with_context(|| format!("LISTEN_FDS, '{name}'"))?;
    match place {
        Place::Inherited { listens: true, path: Some(ref path), .. } => {
            let path = path.clone();
            Ok(Passed { place, path, name })
        }
        _ => bail!(
            "LISTEN_FDS, '{name}': it does not listen at a path. In a socket unit write \
             ListenStream=/run/…, and leave Accept= out"
        ),
    }
}

/// Whether both are the same file, or the same words.
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| canonicalize(path).ok();
    one == other || real(one).is_some_and(|one| Some(one) == real(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_passed_to_this_process_counts() {
        let of = |pid: &str, count: &str, names: Option<&str>| {
            let value = |name: &str| match name {
                "LISTEN_PID" => Some(pid.to_owned()).filter(|pid| !pid.is_empty()),
                "LISTEN_FDS" => Some(count.to_owned()),
                _ => names.map(str::to_owned),
            };
            announced(77, &value)
        };
        assert_eq!(of("", "1", None).unwrap(), None);
        assert_eq!(of("78", "1", None).unwrap(), None, "that was the parent");
        assert_eq!(of("77", "0", None).unwrap(), None);
        let two = of("77", "2", Some("a.socket:b")).unwrap().unwrap();
        assert_eq!(two, Announced { count: 2, names: vec!["a.socket".into(), "b".into()] });
        for wrong in ["", "x", "-1", "4000000000"] {
            assert!(of("77", wrong, None).unwrap_err().to_string().contains("LISTEN_FDS"));
        }
    }
}
