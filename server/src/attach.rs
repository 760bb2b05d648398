//! Lines to paste: how a virtual machine gets the disk.

use std::fmt::Write;
use std::path::Path;

/// One disk, as a virtual machine sees it.
#[derive(Clone, Copy, Debug)]
pub struct Attach<'a> {
    /// Its socket file.
    pub socket: &'a Path,
    /// Request queues.
    pub queues: u16,
    /// Descriptors of the largest ring.
    pub queue_size: u16,
}

/// The largest ring cloud-hypervisor is told of; larger ones gain nothing there.
const RING: u16 = 256;

/// Which QEMU is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion(u32, u32);

impl QemuVersion {
    /// The first version that counts the time to reconnect in milliseconds.
    const RECONNECT_MS: Self = Self(9, 2);

    /// Asks the QEMU for this architecture that is found by its name, if there is one. Starts a
    /// process.
    pub fn installed() -> Option<Self> {
        let program = format!("qemu-system-{}", std::env::consts::ARCH);
        let mut command = std::process::Command::new(program);
        let asked = command.arg("--version").stdin(std::process::Stdio::null()).output().ok()?;
        Self::of(&String::from_utf8_lossy(&asked.stdout))
    }

    /// `QEMU emulator version 7.2.17 (Debian …)`
    fn of(said: &str) -> Option<Self> {
        let (_, version) = said.split_once("version ")?;
        let mut numbers = version.split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

/// Options for QEMU; for the newest if the version is not known.
pub(crate) fn qemu(disks: &[Attach<'_>], version: Option<QemuVersion>) -> String {
    let milliseconds = version.is_none_or(|version| version >= QemuVersion::RECONNECT_MS);
    let reconnect = if milliseconds { "reconnect-ms=1000" } else { "reconnect=1" };
    let mut lines = vec![
        "-m 4G -object memory-backend-memfd,id=mem,size=4G,share=on".to_owned(),
        "-machine memory-backend=mem".to_owned(),
    ];
    for (index, disk) in disks.iter().enumerate() {
        // QEMU reads a doubled comma as a comma.
        let path = disk.socket.display().to_string().replace(',', ",,");
        let chardev = format!("socket,id=disk{index},path={path},{reconnect}");
        lines.push(format!("-chardev {}", shell_word(&chardev)));
        lines.push(format!(
            "-device vhost-user-blk-pci,chardev=disk{index},num-queues={}",
            disk.queues
        ));
    }
    lines.join(" \\\n")
}

/// Elements for libvirt: the first line belongs in `<domain>`, the others in `<devices>`.
pub(crate) fn libvirt(disks: &[Attach<'_>]) -> String {
    let mut xml = String::from(
        "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
    );
    for (index, disk) in disks.iter().enumerate() {
        let path = disk.socket.display().to_string();
        let path = path.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;");
        // Writing to a string cannot fail.
        let _ = write!(
            xml,
            "
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw' queues='{}'/>
  <source type='unix' path='{path}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vd{}' bus='virtio'/>
</disk>",
            disk.queues,
            letters(index)
        );
    }
    xml
}

/// Options for cloud-hypervisor.
pub(crate) fn cloud_hypervisor(disks: &[Attach<'_>]) -> String {
    let mut lines = vec!["--memory size=4G,shared=on".to_owned()];
    for (index, disk) in disks.iter().enumerate() {
        let option = if index == 0 { "--disk " } else { "       " };
        lines.push(format!(
            "{option}{}",
            shell_word(&format!(
                "vhost_user=on,socket={},num_queues={},queue_size={}",
                disk.socket.display(),
                disk.queues,
                disk.queue_size.min(RING)
            ))
        ));
    }
    lines.join(" \\\n")
}

/// The word as a shell takes it.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// Disk names as Linux counts them: a … z, aa, ab, …
fn letters(index: usize) -> String {
    let last = char::from(b'a' + u8::try_from(index % 26).unwrap_or(0));
    match index / 26 {
        0 => last.into(),
        more => format!("{}{last}", letters(more - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attach(socket: &str) -> Attach<'_> {
        Attach { socket: Path::new(socket), queues: 4, queue_size: 1024 }
    }

    #[test]
    fn lines_can_be_pasted_whatever_the_path() {
        let odd = [attach("/run/it's, <odd>.sock")];
        assert!(
            qemu(&odd, None).contains(r"-chardev 'socket,id=disk0,path=/run/it'\''s,, <odd>.sock,")
        );
        assert!(libvirt(&odd).contains("path='/run/it&apos;s, &lt;odd>.sock'"));
    }

    #[test]
    fn reconnecting_is_said_as_the_installed_version_takes_it() {
        let one = [attach("/run/a")];
        for (said, wanted) in [
            ("QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7)\nCopyright", "reconnect=1"),
            ("QEMU emulator version 9.1.0", "reconnect=1"),
            ("QEMU emulator version 9.2.0", "reconnect-ms=1000"),
            ("QEMU emulator version 10.0.2", "reconnect-ms=1000"),
            ("something else", "reconnect-ms=1000"),
        ] {
            let text = qemu(&one, QemuVersion::of(said));
            assert!(text.contains(&format!("path=/run/a,{wanted} ")), "{said}: {text}");
        }
    }

    #[test]
    fn memory_is_shared_once_and_every_disk_attached() {
        let two = [attach("/run/a"), attach("/run/b")];
        for (text, memory) in [
            (qemu(&two, None), "share=on"),
            (libvirt(&two), "mode='shared'"),
            (cloud_hypervisor(&two), "shared=on"),
        ] {
            assert_eq!(text.matches(memory).count(), 1, "{text}");
            assert!(text.contains("/run/a") && text.contains("/run/b"), "{text}");
            assert!(text.lines().all(|line| line.len() < 79), "{text}");
        }
        assert!(libvirt(&two).contains("dev='vdb'"));
        assert_eq!(cloud_hypervisor(&two).matches("--disk").count(), 1);
        assert_eq!((letters(25), letters(26)), ("z".into(), "aa".into()));
    }
}
