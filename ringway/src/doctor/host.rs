//! What the host is and has.

use ringway_control::config::{CpuList, cpus};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The host as this process sees it.
#[derive(Debug, Serialize)]
pub(crate) struct Host {
    /// `6.1.0-18-amd64`.
    pub(crate) kernel: String,
    /// `x86_64`.
    pub(crate) architecture: &'static str,
    /// CPUs this process may use.
    pub(crate) cpus: u16,
    /// Their numbers, as for `--cpus`.
    pub(crate) cpu_list: String,
    pub(crate) cpu_model: Option<String>,
    /// Memory that may be pinned (`ulimit -l`); `None` is no limit.
    pub(crate) memlock_bytes: Option<u64>,
    /// The limit does not hold for this process (`CAP_IPC_LOCK`).
    pub(crate) memlock_exempt: bool,
    /// Descriptors this process may have open; `None` is no limit.
    pub(crate) open_files: Option<u64>,
    pub(crate) huge_pages: Vec<HugePages>,
    pub(crate) aio_requests: Option<AioRequests>,
    /// Version of its interface, if the kernel has Landlock.
    pub(crate) landlock_abi: Option<libc::c_long>,
    pub(crate) seccomp: bool,
    /// Guests run on the CPU itself.
    pub(crate) kvm: bool,
    pub(crate) programs: Vec<Program>,
    /// A folder for sockets.
    pub(crate) socket_folder: PathBuf,
}

/// Huge pages of one size.
#[derive(Debug, Serialize)]
pub(crate) struct HugePages {
    pub(crate) page_bytes: u64,
    pub(crate) total: u64,
    pub(crate) free: u64,
}

/// Linux AIO requests of all processes together.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct AioRequests {
    pub(crate) used: u64,
    pub(crate) max: u64,
}

/// A program that goes with this one.
#[derive(Debug, Serialize)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) version: String,
}

pub(crate) fn inspect() -> Host {
    let max_of = |resource| getrlimit(resource).current;
    Host {
        kernel: word("/proc/sys/kernel/osrelease").unwrap_or_default(),
        architecture: std::env::consts::ARCH,
        cpus: cpus(),
        cpu_list: CpuList::allowed().to_string(),
        cpu_model: after_colon("/proc/cpuinfo", "model name"),
        memlock_bytes: max_of(Resource::Memlock),
        memlock_exempt: may_lock_any_amount(),
        // A daemon raises its own limit as far as it may.
        open_files: getrlimit(Resource::Nofile).maximum,
        huge_pages: huge_pages(),
        aio_requests: number("/proc/sys/fs/aio-nr")
            .zip(number("/proc/sys/fs/aio-max-nr"))
            .map(|(used, max)| AioRequests { used, max }),
        landlock_abi: landlock_abi(),
        seccomp: Path::new("/proc/sys/kernel/seccomp/actions_avail").exists(),
        kvm: Path::new("/dev/kvm").exists(),
        programs: programs(),
        socket_folder: socket_folder(),
    }
}

/// CAP_IPC_LOCK, <linux/capability.h>.
fn may_lock_any_amount() -> bool {
    let mask = after_colon("/proc/self/status", "CapEff");
    mask.and_then(|mask| u64::from_str_radix(&mask, 16).ok())
        .is_some_and(|mask| mask >> 14 & 1 == 1)
}

fn huge_pages() -> Vec<HugePages> {
    let folders = std::fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let mut sizes: Vec<_> = folders
        .filter_map(|folder| {
            // hugepages-2048kB
            let name = folder.file_name().into_string().ok()?;
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            Some(HugePages {
                page_bytes: kib * 1024,
                total: number(folder.path().join("nr_hugepages"))?,
                free: number(folder.path().join("free_hugepages"))?,
            })
        })
        .collect();
    sizes.sort_by_key(|size| size.page_bytes);
    sizes
}

/// landlock_create_ruleset(2): asked for its version it creates nothing.
fn landlock_abi() -> Option<libc::c_long> {
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag there is no attribute to read, and nothing is made.
    let abi = unsafe {
        let nothing = std::ptr::null::<libc::c_void>();
        libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0usize, VERSION)
    };
    (abi > 0).then_some(abi)
}

fn programs() -> Vec<Program> {
    let emulator = format!("qemu-system-{}", std::env::consts::ARCH);
    [emulator.as_str(), "qemu-kvm", "qemu-storage-daemon", "cloud-hypervisor"]
        .into_iter()
        .filter_map(|name| Some(Program { name: name.into(), version: version_of(name)? }))
        .collect()
}

/// The first word of `--version` that looks like one.
fn version_of(program: &str) -> Option<String> {
    let output =
        Command::new(program).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    let number =
        |word: &&str| word.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit());
    Some(text.split_whitespace().find(number)?.to_owned())
}

/// Where sockets can be put without asking anybody.
fn socket_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => folder.into(),
        _ if rustix::process::geteuid().is_root() => "/run".into(),
        _ => std::env::temp_dir(),
    }
}

/// `name : value` in a file of such lines.
fn after_colon(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let (_, value) =
        text.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == name)?;
    Some(value.trim().to_owned())
}

fn word(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    word(path)?.parse().ok()
}
