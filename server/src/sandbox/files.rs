//! Files, ports and signals (Landlock): what a process can no longer reach, whatever it calls.
//!
//! This holds also for requests by io_uring, which no filter of system calls sees.

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, RestrictionStatus,
    Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope,
};

/// The newest rules that are known here; older kernels have fewer.
const RULES: ABI = ABI::V6;

/// From now on nothing can be opened or changed by its path, no port opened or connected to, no
/// abstract socket and no process outside be reached; with `network` ports can be connected to. What is
/// open stays usable. Says in a few words what that is here.
///
/// # Errors
/// What the kernel says, other than that it does not know this.
pub(super) fn close_the_file_system(network: bool) -> anyhow::Result<String> {
    let ports = if network { AccessNet::BindTcp.into() } else { AccessNet::from_all(RULES) };
    let status = restrict(AccessFs::from_all(RULES), ports);
    let status = status.context("the kernel refuses Landlock")?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => "no files".into(),
        RulesetStatus::PartiallyEnforced => "no files (an older Landlock)".into(),
        RulesetStatus::NotEnforced => {
            tracing::warn!(
                "this kernel has no Landlock, or it is switched off (lsm=): the filter of system \
                 calls alone keeps the daemon from files"
            );
            "files by the filter alone".into()
        }
    })
}

/// For the helper process: opens images, makes and removes sockets, connects to ports if `network`, and
/// nothing else.
pub(super) fn close_the_rest(network: bool) {
    let allowed = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
        | AccessFs::IoctlDev;
    let ports = if network { AccessNet::BindTcp.into() } else { AccessNet::from_all(RULES) };
    if let Err(error) = restrict(AccessFs::from_all(RULES) & !allowed, ports) {
        // Nobody talks to it but the daemon; it goes on without.
        tracing::debug!("the helper's files are not confined: {error}");
    }
}

/// For the process that looks up hosts: it reads files and connects, and nothing else.
pub(super) fn close_all_but_reading() {
    let allowed = AccessFs::ReadFile | AccessFs::ReadDir;
    if let Err(error) = restrict(AccessFs::from_all(RULES) & !allowed, AccessNet::BindTcp.into()) {
        // Nobody talks to it but the helper, and it has nothing; it goes on without.
        tracing::debug!("the resolver's files are not confined: {error}");
    }
}

/// Takes `files` away, for every path, and `ports`.
fn restrict(
    files: BitFlags<AccessFs>,
    ports: BitFlags<AccessNet>,
) -> Result<RestrictionStatus, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(files)?
        .handle_access(ports)?
        .scope(Scope::from_all(RULES))?
        .create()?
        .restrict_self()
}
