//! What of io_uring the running kernel has, asked feature by feature.

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{Builder, IoUring as Ring, Probe, Submitter, cqueue, opcode, squeue};
use std::io;

/// How [`super::IoUring`] is set up.
#[derive(Clone, Copy, Debug)]
pub struct IoUringSetup<'a> {
    /// Operations at a time.
    pub depth: u32,
    /// Features to leave alone even if the kernel has them: for tests and for comparing.
    pub without: &'a [Feature],
    /// Poll devices for completions, of files that [`super::can_poll`]. Not together with `buffers`.
    pub iopoll: bool,
    /// Numbers for registered buffers: [`crate::Limits::registered_buffers`]. With any, memory that is
    /// named by [`crate::Engine::map_memory`] is not prepared.
    pub buffers: u16,
    /// Commands at a time, beside `depth` operations; 0 for no port.
    pub commands: u32,
}

impl IoUringSetup<'_> {
    /// `depth` operations at a time with all that the kernel has; no polling, no numbers for buffers, no
    /// commands.
    #[must_use]
    pub const fn new(depth: u32) -> Self {
        Self { depth, without: &[], iopoll: false, buffers: 0, commands: 0 }
    }
}

/// The most threads of the kernel's for what blocks on files. It starts them as they are needed.
const THREADS_MAX: u32 = 512;

/// Slots of the table of registered files; files beyond are used by their descriptors.
pub(crate) const FILES: u32 = 256;

/// `IORING_REGISTER_BUFFERS`, `IORING_UNREGISTER_BUFFERS`, `IORING_UNREGISTER_FILES` and
/// `IORING_REGISTER_FILES_UPDATE`.
const REGISTER_OPS: [u8; 4] = [0, 1, 3, 6];
/// `IORING_REGISTER_BUFFERS_UPDATE`, for rings whose buffers have numbers.
const UPDATE_BUFFERS: u8 = 16;

/// What a ring for files takes.
const FILE_OPS: [u8; 13] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::UringCmd16::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::ReadvFixed::CODE,
    opcode::WritevFixed::CODE,
];

/// A part of io_uring that Ringway uses where it can and goes without where it must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// IORING_SETUP_NO_SQARRAY: no indirection in the submission queue.
    NoSqArray,
    /// IORING_SETUP_DEFER_TASKRUN: completions are posted when we enter, never by interrupting us.
    DeferTaskrun,
    /// IORING_SETUP_SINGLE_ISSUER: only one thread submits.
    SingleIssuer,
    /// IORING_SETUP_COOP_TASKRUN, the forerunner of [`Feature::DeferTaskrun`].
    CoopTaskrun,
    /// IORING_SETUP_SUBMIT_ALL: an entry that fails at once does not hold up those behind it.
    SubmitAll,
    /// Files are looked up once, when they are attached.
    RegisteredFiles,
    /// Memory is pinned once, by [`crate::Engine::map_memory`] or [`crate::Engine::set_buffer`].
    RegisteredBuffers,
    /// [`Feature::RegisteredBuffers`] also for transfers of several segments.
    VectoredBuffers,
    /// The ring accepts nothing but the operations used here.
    Restrictions,
    /// Discarding blocks of a block device.
    Discard,
    /// Commands for drivers: [`crate::Engine::queue_command`].
    Commands,
}

impl Feature {
    /// All of them. Those asked for when the ring is set up come first, newest first.
    pub const ALL: [Self; 11] = [
        Self::NoSqArray,
        Self::DeferTaskrun,
        Self::SingleIssuer,
        Self::CoopTaskrun,
        Self::SubmitAll,
        Self::RegisteredFiles,
        Self::RegisteredBuffers,
        Self::VectoredBuffers,
        Self::Restrictions,
        Self::Discard,
        Self::Commands,
    ];

    /// What users know it by.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoSqArray => "no-sqarray",
            Self::DeferTaskrun => "defer-taskrun",
            Self::SingleIssuer => "single-issuer",
            Self::CoopTaskrun => "coop-taskrun",
            Self::SubmitAll => "submit-all",
            Self::RegisteredFiles => "registered-files",
            Self::RegisteredBuffers => "registered-buffers",
            Self::VectoredBuffers => "vectored-buffers",
            Self::Restrictions => "restrictions",
            Self::Discard => "discard",
            Self::Commands => "commands",
        }
    }

    /// The first version of Linux that has it.
    #[must_use]
    pub const fn since(self) -> &'static str {
        match self {
            Self::NoSqArray => "6.6",
            Self::DeferTaskrun => "6.1",
            Self::SingleIssuer => "6.0",
            Self::CoopTaskrun | Self::RegisteredFiles | Self::Commands => "5.19",
            Self::SubmitAll => "5.18",
            Self::RegisteredBuffers => "5.1",
            Self::VectoredBuffers => "6.15",
            Self::Restrictions => "5.10",
            Self::Discard => "6.12",
        }
    }
}

/// Why a feature is not in use that the caller did not want.
const OFF: &str = "switched off";

/// Which features are in use; for each that is not, why.
#[derive(Clone, Debug)]
pub struct Features {
    why_not: [Option<String>; Feature::ALL.len()],
}

impl Features {
    /// True if it is in use.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.why_not(feature).is_none()
    }

    /// Why it is not in use, or `None` if it is.
    #[must_use]
    pub fn why_not(&self, feature: Feature) -> Option<&str> {
        self.why_not[feature as usize].as_deref()
    }

    /// True if it was switched off by the caller.
    pub(super) fn is_off(&self, feature: Feature) -> bool {
        self.why_not(feature) == Some(OFF)
    }

    pub(super) fn set(&mut self, feature: Feature, why_not: Option<String>) {
        self.why_not[feature as usize] = why_not;
    }

    fn refuse(&mut self, feature: Feature, why: impl Into<String>) {
        self.why_not[feature as usize].get_or_insert_with(|| why.into());
    }
}

/// What this host's io_uring can do, found out on a ring that is thrown away.
///
/// # Errors
/// Says why there is none for us.
pub fn probe() -> io::Result<Features> {
    set_up(8, 0, &[]).map(|(_, features)| features)
}

/// A ring that is not enabled yet, with an empty table of `buffers` registered buffers. It takes the
/// operations of [`super::IoUring`].
pub(super) fn set_up(
    entries: u32,
    buffers: u16,
    without: &[Feature],
) -> io::Result<(Ring, Features)> {
    set_up_for(entries, buffers, without, &FILE_OPS)
}

/// The same with entries and completions of any size, for these operations.
pub(crate) fn set_up_for<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    buffers: u16,
    without: &[Feature],
    ops: &[u8],
) -> io::Result<(Ring<S, C>, Features)> {
    let mut features = Features { why_not: Default::default() };
    for &feature in without {
        features.refuse(feature, OFF);
    }
    if !features.has(Feature::SingleIssuer) {
        features.refuse(Feature::DeferTaskrun, "needs single-issuer");
    }
    let ring: Ring<S, C> = build(entries, &mut features).map_err(explain)?;
    if !ring.params().is_feature_resource_tagging() || !ring.params().is_feature_ext_arg() {
        return Err(unsupported("this kernel's io_uring is too old (needs Linux 5.13)"));
    }
    if features.has(Feature::DeferTaskrun) {
        features.refuse(Feature::CoopTaskrun, "defer-taskrun does better");
    }
    // What blocks takes a thread of the kernel's each, of which there are four for each CPU else: too few where the
    // storage of a few disks hangs. Linux before 5.15 does not know it.
    let _ = ring.submitter().register_iowq_max_workers(&mut [THREADS_MAX, 0]);
    register_files(&ring.submitter(), &mut features);
    if buffers == 0 {
        features.refuse(Feature::RegisteredBuffers, "no memory was named");
    } else if features.has(Feature::RegisteredBuffers) {
        if let Err(e) = ring.submitter().register_buffers_sparse(buffers.into()) {
            features.refuse(Feature::RegisteredBuffers, format!("the kernel refuses: {e}"));
        }
    }
    let mut known = Probe::new();
    ring.submitter().register_probe(&mut known)?;
    if !known.is_supported(opcode::ReadvFixed::CODE) {
        features.refuse(Feature::VectoredBuffers, came_with(Feature::VectoredBuffers));
    }
    if !known.is_supported(opcode::UringCmd16::CODE) {
        features.refuse(Feature::Commands, came_with(Feature::Commands));
    }
    // What drivers take cannot be asked for; discard has no flag of its own.
    if !known.is_supported(opcode::UringCmd16::CODE) || !kernel_is_at_least(6, 12) {
        features.refuse(Feature::Discard, came_with(Feature::Discard));
    }
    restrict(&ring.submitter(), ops, buffers > 0, &mut features);
    Ok((ring, features))
}

/// Asks for everything; as long as the kernel does not know it all, for less.
fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    features: &mut Features,
) -> io::Result<Ring<S, C>> {
    loop {
        let asked = request(entries, features).build(entries);
        let setup_flags = &Feature::ALL[..5];
        let newest = setup_flags.iter().copied().find(|&feature| features.has(feature));
        match (asked, newest) {
            (Err(e), Some(newest)) if e.raw_os_error() == Some(libc::EINVAL) => {
                features.refuse(newest, came_with(newest));
            }
            (asked, _) => return asked,
        }
    }
}

fn request<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    features: &Features,
) -> Builder<S, C> {
    let mut builder = Ring::<S, C>::builder();
    // Room for a completion of each entry in flight and for as many doorbells between two reaps.
    builder.dontfork().setup_r_disabled().setup_cqsize(entries * 2);
    if features.has(Feature::NoSqArray) {
        builder.setup_no_sqarray();
    }
    if features.has(Feature::SingleIssuer) {
        builder.setup_single_issuer();
    }
    if features.has(Feature::DeferTaskrun) {
        builder.setup_defer_taskrun().setup_taskrun_flag();
    } else if features.has(Feature::CoopTaskrun) {
        builder.setup_coop_taskrun().setup_taskrun_flag();
    }
    if features.has(Feature::SubmitAll) {
        builder.setup_submit_all();
    }
    builder
}

fn register_files(ring: &Submitter<'_>, features: &mut Features) {
    if !features.has(Feature::RegisteredFiles) {
        return;
    }
    if let Err(e) = ring.register_files_sparse(FILES) {
        features.refuse(Feature::RegisteredFiles, format!("the kernel refuses: {e}"));
    }
}

/// From now on the ring accepts what this engine sends and nothing else.
fn restrict(ring: &Submitter<'_>, ops: &[u8], buffers: bool, features: &mut Features) {
    if !features.has(Feature::Restrictions) {
        return;
    }
    // A kernel refuses to allow what it does not know.
    let vectored = features.has(Feature::VectoredBuffers);
    let newer = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];
    let known = |op: &&u8| vectored || !newer.contains(op);
    let mut allowed = ops
        .iter()
        .filter(known)
        .map(|&op| Restriction::sqe_op(op))
        .chain(REGISTER_OPS.map(Restriction::register_op))
        .chain(buffers.then(|| Restriction::register_op(UPDATE_BUFFERS)))
        .chain([Restriction::sqe_flags_allowed(Flags::FIXED_FILE.bits())])
        .collect::<Vec<_>>();
    if let Err(e) = ring.register_restrictions(&mut allowed) {
        features.refuse(Feature::Restrictions, format!("the kernel refuses: {e}"));
    }
}

fn came_with(feature: Feature) -> String {
    format!("not in this kernel (came with Linux {})", feature.since())
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

fn explain(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => {
            unsupported("this kernel has no io_uring, or a seccomp profile hides it")
        }
        Some(libc::EPERM) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or a seccomp filter)",
        ),
        Some(libc::ENOMEM) => io::Error::new(
            io::ErrorKind::OutOfMemory,
            "no memory for an io_uring (ulimit -l, before Linux 5.12)",
        ),
        _ => error,
    }
}

fn unsupported(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::{Need, skip};

    #[test]
    fn what_is_left_out_is_said_why() {
        let all = match probe() {
            Ok(all) => all,
            Err(error) => return skip(Need::IoUring, error),
        };
        assert!(!all.has(Feature::RegisteredBuffers), "no memory was named");
        for feature in Feature::ALL {
            println!("{:18} {:?}", feature.name(), all.why_not(feature));
            let (_ring, features) = set_up(8, 0, &[feature]).unwrap();
            assert_eq!(features.why_not(feature), Some("switched off"));
        }
        assert!(set_up(8, 0, &Feature::ALL).is_ok());
    }

    #[test]
    fn a_ring_refuses_what_the_engine_never_asks_for() {
        let (mut ring, features) = match set_up(8, 0, &[]) {
            Ok(made) => made,
            Err(error) => return skip(Need::IoUring, error),
        };
        if let Some(why) = features.why_not(Feature::Restrictions) {
            return skip(Need::IoUringFeature, why);
        }
        ring.submitter().register_enable_rings().unwrap();
        let at = io_uring::types::Fd(libc::AT_FDCWD);
        let none = io_uring::types::Fd(-1);
        let path = c"/".as_ptr();
        for entry in [
            opcode::OpenAt::new(at, path).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(none, std::ptr::null(), 0).build(),
            opcode::UnlinkAt::new(at, path).build(),
            opcode::Nop::new().build(),
            // An operation that is known, in a way that is not.
            opcode::PollAdd::new(none, 1).build().flags(Flags::ASYNC),
        ] {
            // SAFETY: the path is a constant; the kernel refuses to look at the rest.
            unsafe { ring.submission().push(&entry) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            let done = ring.completion().next().unwrap();
            assert_eq!(done.result(), -libc::EACCES, "{entry:?}");
        }
        let late = ring.submitter().register_personality();
        assert_eq!(late.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn knows_old_kernels_from_new_ones() {
        assert!(kernel_is_at_least(2, 6));
        assert!(!kernel_is_at_least(999, 0));
    }
}
