//! What a qcow2 image says of itself, and those it is based on.

use crate::new_file::cannot_open;
use crate::waiting::ADVICE;
use anyhow::Context;
use ringway_control::size::Size;
use ringway_disk::open::holder;
use ringway_image::{Chain, Format, Header, ImageFile, Snapshot, Top, printable};
use serde::Serialize;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::doctor::report::{Grade, ReportLine, line};

/// One image of a chain. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
pub(crate) struct Link {
    name: String,
    format: &'static str,
    /// Bytes of disk.
    virtual_bytes: u64,
    file_bytes: u64,
    /// Bytes of the file that are really there; `None` for block devices.
    allocated_bytes: Option<u64>,
    /// What the next image is called here.
    backing: Option<String>,
    backing_format: Option<String>,
    data_file: Option<String>,
    qcow2: Option<Details>,
}

/// What only qcow2 images have.
#[derive(Debug, Serialize)]
struct Details {
    compat: &'static str,
    cluster_bytes: u64,
    refcount_bits: u32,
    compression: &'static str,
    features: Vec<&'static str>,
    /// Why it cannot be written.
    not_writable: Option<String>,
    /// A daemon that was killed has more of it than it has.
    waits_for_daemon: bool,
    snapshots: Vec<Taken>,
}

#[derive(Debug, Serialize)]
struct Taken {
    id: String,
    name: String,
    /// Since 1970.
    seconds: u32,
    vm_state_bytes: u64,
    virtual_bytes: Option<u64>,
}

/// Opens the chain of an image, for reading, and lets go of it again. No lock is taken: what is said of
/// an image that is being written may be old.
///
/// # Errors
/// A chain that cannot be opened.
pub(crate) fn inspect(path: &Path, root: Option<&Path>) -> anyhow::Result<Vec<Link>> {
    let mut options = OpenOptions::new();
    // A pipe that nobody writes to would be waited for.
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| cannot_open(path, error))?;
    let top = Top { file, name: path.to_owned(), format: Format::Qcow2, read_only: true };
    let chain = Chain::open(top, root, &mut |_, _, _| Ok(()))?;
    chain.files.iter().map(link).collect()
}

fn link(image: &ImageFile) -> anyhow::Result<Link> {
    let name = printable(&image.name);
    let read = || format!("{name}: cannot read it");
    let meta = image.file.metadata().with_context(read)?;
    let device = meta.file_type().is_block_device();
    let file_bytes = if device {
        rustix::fs::seek(&image.file, rustix::fs::SeekFrom::End(0)).with_context(read)?
    } else {
        meta.len()
    };
    let backing = image.header.as_ref().and_then(|header| header.backing.as_ref());
    let qcow2 = image.header.as_ref().map(|header| details(image, header, file_bytes));
    Ok(Link {
        format: image.format.name(),
        virtual_bytes: image.virtual_size,
        file_bytes,
        // st_blocks counts 512 bytes each.
        allocated_bytes: (!device).then(|| meta.blocks() * 512),
        backing: backing.map(|backing| printable(&backing.name)),
        backing_format: backing
            .and_then(|backing| Some(printable(Path::new(backing.format.as_deref()?)))),
        data_file: image.data_file.as_ref().map(|data| printable(&data.name)),
        qcow2: qcow2.transpose().with_context(read)?,
        name,
    })
}

fn details(image: &ImageFile, header: &Header, file_bytes: u64) -> anyhow::Result<Details> {
    let (snapshots, _) = Snapshot::read_all(&image.file, header, file_bytes)??;
    let taken = |snapshot: Snapshot| Taken {
        id: printable(Path::new(&snapshot.id)),
        name: printable(Path::new(&snapshot.name)),
        seconds: snapshot.seconds,
        vm_state_bytes: snapshot.vm_state_bytes,
        virtual_bytes: snapshot.virtual_size,
    };
    let raw_data = image.data_file.as_ref().is_some_and(|data| data.raw);
    let features = [
        (header.has_lazy_refcounts(), "lazy refcounts"),
        (header.is_dirty(), "dirty"),
        (header.is_corrupt(), "corrupt"),
        (header.bitmaps.is_some(), "bitmaps"),
        (image.data_file.is_some(), "external data file"),
        (raw_data, "raw external data"),
    ];
    Ok(Details {
        compat: header.compat(),
        cluster_bytes: header.cluster_bytes(),
        refcount_bits: header.refcount_bits(),
        compression: header.compression.name(),
        features: features.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect(),
        // While it is served that is no fault. Who only reads it shares its lock.
        waits_for_daemon: header.waits_for_journal() && holder(&image.name, true).is_none(),
        not_writable: header.may_write().err().map(|refused| refused.to_string()),
        snapshots: snapshots.into_iter().map(taken).collect(),
    })
}

/// The sections of the report: one for each image, the first one first.
pub(crate) fn sections(chain: &[Link]) -> Vec<(String, Vec<ReportLine>)> {
    let titles = (0..).map(|number| match number {
        0 => "Image",
        _ => "Based on",
    });
    chain.iter().zip(titles).map(|(link, t)| (format!("{t} {}", link.name), lines(link))).collect()
}

fn fact(name: &str, value: impl Into<String>) -> ReportLine {
    line(Grade::Fact, name, value)
}

fn lines(link: &Link) -> Vec<ReportLine> {
    let mut lines = vec![
        fact("format", link.format),
        fact("size", format!("{} ({})", Size(link.virtual_bytes), link.virtual_bytes)),
    ];
    let file = Size(link.file_bytes);
    lines.push(match link.allocated_bytes {
        Some(bytes) => fact("file", format!("{file}, {} allocated", Size(bytes))),
        None => fact("device", file.to_string()),
    });
    if let Some(qcow2) = &link.qcow2 {
        let counts = format!("{} bits per reference count", qcow2.refcount_bits);
        let compat = format!("{}, {counts}, compression {}", qcow2.compat, qcow2.compression);
        lines.push(fact("clusters", Size(qcow2.cluster_bytes).to_string()));
        lines.push(fact("compat", compat));
        if !qcow2.features.is_empty() {
            lines.push(fact("features", qcow2.features.join(", ")));
        }
        if let Some(why) = &qcow2.not_writable {
            lines.push(line(Grade::Warn, "read-only", why.clone()));
        }
        if qcow2.waits_for_daemon {
            lines.push(line(Grade::Warn, "not whole", ADVICE));
        }
        for snapshot in &qcow2.snapshots {
            let memory = match snapshot.vm_state_bytes {
                0 => String::new(),
                bytes => format!(", with {} of memory", Size(bytes)),
            };
            let size = snapshot.virtual_bytes.map_or(String::new(), |n| format!(", {}", Size(n)));
            let text = format!("{} '{}'{size}{memory}", snapshot.id, snapshot.name);
            lines.push(fact("snapshot", text));
        }
    }
    if let Some(name) = &link.data_file {
        lines.push(fact("data file", name.clone()));
    }
    if let Some(name) = &link.backing {
        let format = link.backing_format.as_deref().unwrap_or("no format");
        lines.push(fact("backing", format!("{name} ({format})")));
    }
    lines
}
