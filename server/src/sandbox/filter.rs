//! From lists of calls to filters of the kernel (seccomp).

use super::calls::{Call, Rule};
use anyhow::{Context, anyhow};
use ringway_control::config::Sandbox as Mode;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;

/// A filter, as the kernel takes it.
pub(super) type Program = BpfProgram;

/// Lets `calls` pass and, as `mode` has it, ends the process or tells the audit log at all others.
pub(super) fn compile(calls: &[Call], mode: Mode) -> anyhow::Result<Program> {
    let otherwise = if mode == Mode::Log { SeccompAction::Log } else { SeccompAction::KillProcess };
    program(calls, conditions, otherwise, SeccompAction::Allow)
}

/// Answers with ENOSYS what of `calls` is not to be, and lets everything else pass. Of several filters the
/// strictest answer counts, and this one is stricter than letting pass.
pub(super) fn compile_refusals(calls: &[Call]) -> anyhow::Result<Program> {
    let refused = |call: &&Call| matches!(call.rule, Rule::Refused | Rule::Zero(_));
    let refused: Vec<Call> = calls.iter().filter(refused).cloned().collect();
    let errno = SeccompAction::Errno(libc::ENOSYS as u32);
    program(&refused, refusals, SeccompAction::Allow, errno)
}

/// When a call is meant.
type Conditions = fn(&Rule) -> Result<Vec<SeccompRule>, BackendError>;

fn program(
    calls: &[Call],
    conditions: Conditions,
    others: SeccompAction,
    these: SeccompAction,
) -> anyhow::Result<Program> {
    let rules = calls.iter().map(|call| Ok((call.number, conditions(&call.rule)?)));
    let rules = rules.collect::<Result<BTreeMap<_, _>, BackendError>>()?;
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, others, these, arch)?;
    Ok(filter.try_into()?)
}

/// Each rule is one way to be allowed; none at all means without conditions.
fn conditions(rule: &Rule) -> Result<Vec<SeccompRule>, BackendError> {
    let equal = |argument, value: u32| {
        SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value.into())
    };
    match rule {
        // Of the last two, the filter of refusals knows more.
        Rule::Always | Rule::Refused | Rule::Zero(_) => Ok(Vec::new()),
        Rule::OneOf(argument, values) => {
            values.iter().map(|&v| SeccompRule::new(vec![equal(*argument, v)?])).collect()
        }
        Rule::Bits { argument, set, clear } => {
            let mask = SeccompCmpOp::MaskedEq(set | clear);
            Ok(vec![SeccompRule::new(vec![SeccompCondition::new(*argument, Qword, mask, *set)?])?])
        }
        Rule::Both(first, thirds) => thirds
            .iter()
            .map(|&third| SeccompRule::new(vec![equal(0, *first)?, equal(2, third)?]))
            .collect(),
    }
}

/// When a call is answered with ENOSYS, for those that ever are.
fn refusals(rule: &Rule) -> Result<Vec<SeccompRule>, BackendError> {
    let Rule::Zero(argument) = *rule else { return Ok(Vec::new()) };
    let condition = SeccompCondition::new(argument, Dword, SeccompCmpOp::Ne, 0)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// Puts a filter on this thread and all that it will start. It adds to those that are there.
pub(super) fn install(program: &Program) -> anyhow::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| anyhow!("a filter is too long"))?;
    let filter = program.as_ptr().cast_mut().cast();
    let described = libc::sock_fprog { len, filter };
    // By prctl, as one call less is to be allowed then.
    // SAFETY: the kernel reads `len` instructions, which are laid out as its own.
    let rc = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const described, 0, 0)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error()).context(
            "the kernel takes no filter of system calls. --sandbox off does without the sandbox",
        );
    }
    Ok(())
}
