//! A destination that is a new qcow2 image: it has no name until it is complete, durable and, if that
//! was asked for, compared.

use super::args::{CompressArg, CopyArgs};
use super::end::End;
use super::image::ImageEnd;
use crate::new_file;
use crate::waiting::nothing_waits;
use crate::wrong_usage::wrong_usage;
use anyhow::{Context, bail};
use ringway_disk::NewFile;
use ringway_image::{
    Builder, CLUSTER_BITS_DEFAULT, Chain, Compression, Format, Layer, Top, printable,
};
use std::fs::File;
use std::sync::Arc;

/// An image on its way.
#[derive(Debug)]
pub(super) struct NewImage {
    file: NewFile,
    /// What it takes the place of, locked until then.
    old: Option<File>,
    builder: Option<Builder>,
    /// Bytes of a cluster.
    pub(super) cluster: u64,
    /// Each cluster has to come whole.
    pub(super) compressed: bool,
    /// Bytes of its file, once it is finished.
    pub(super) file_bytes: u64,
}

impl NewImage {
    /// Refuses what options cannot mean for it.
    ///
    /// # Errors
    /// What is wrong.
    fn prepare(args: &CopyArgs) -> anyhow::Result<()> {
        let to = &args.destination;
        let options = [
            (args.resume, "--resume"),
            (args.journal.is_some(), "--journal"),
            (args.prealloc.is_some(), "--prealloc"),
            (args.reflink == super::args::Reflink::Always, "--reflink always"),
            (args.target_is_zero, "--target-is-zero"),
            (args.keep_zeroes, "--keep-zeroes"),
        ];
        if let Some((_, option)) = options.iter().find(|(is, _)| *is) {
            wrong_usage!(
                "{to} will be a qcow2 image, made anew and in one go: {option} is for raw ones. Say it \
                 again without {option}"
            );
        }
        Ok(())
    }

    /// Begins an image for `bytes` bytes of disk, and the end that fills it.
    ///
    /// # Errors
    /// What options cannot mean for it; what must not be overwritten; what the host says. Nothing is left.
    pub(super) fn begin(args: &CopyArgs, bytes: u64, mode: u32) -> anyhow::Result<(Self, End)> {
        Self::prepare(args)?;
        let to = &args.destination;
        let cannot = || format!("cannot make {to}");
        let target = new_file::place(to.path())?;
        let old = new_file::spare(to.path(), &target, args.force)?;
        let file = NewFile::begin(&target, mode).with_context(cannot)?;
        if let Some(old) = &old {
            new_file::take_after(file.file(), old).with_context(|| to.to_string())?;
        }
        let cluster_bits = args.cluster_size.unwrap_or(CLUSTER_BITS_DEFAULT);
        let compression = args.compress.map(|kind| match kind {
            CompressArg::Zlib => Compression::Zlib,
            CompressArg::Zstd => Compression::Zstd,
        });
        let own = Arc::new(file.file().try_clone().with_context(cannot)?);
        let size = bytes.next_multiple_of(512);
        let builder = Builder::new(own, size, cluster_bits, compression).with_context(cannot)?;
        let end = ImageEnd::of_new(|| builder.filler())?;
        let compressed = compression.is_some();
        let cluster = 1 << cluster_bits;
        let new = Self { file, old, builder: Some(builder), cluster, compressed, file_bytes: 0 };
        Ok((new, End::Image(Box::new(end))))
    }

    /// Writes what makes it an image, makes it durable, and opens it to be read.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn finish(&mut self) -> anyhow::Result<End> {
        if let Some(builder) = self.builder.take() {
            self.file_bytes = builder.finish()?;
        }
        self.file.file().sync_all()?;
        let top = Top {
            file: self.file.file().try_clone()?,
            name: self.file.path().to_owned(),
            format: Format::Qcow2,
            read_only: true,
        };
        let chain = Chain::open(top, None, &mut |_, _, _| Ok(()))?;
        Ok(End::Image(Box::new(ImageEnd::of_chain(Layer::of_chain(chain)?, false)?)))
    }

    /// Gives it its name, which nobody else has taken meanwhile.
    ///
    /// # Errors
    /// What the host says, or that somebody has made such a file meanwhile.
    pub(super) fn name(self) -> anyhow::Result<()> {
        self.file.finish(self.old.is_some()).context("cannot give it its name")
    }
}

/// Opens a chain to be read, each of its files locked.
///
/// # Errors
/// What is wrong with it, and what to do.
pub(super) fn open_chain(args: &CopyArgs, file: &File) -> anyhow::Result<End> {
    let path = args.source.path();
    let top = Top {
        file: file.try_clone()?,
        name: path.to_owned(),
        format: Format::Qcow2,
        read_only: true,
    };
    let mut lock = |file: &File, _: &std::path::Path, read_only: bool| {
        ringway_disk::lock_image(file, read_only).map_err(|error| error.to_string())
    };
    let chain = Chain::open(top, args.backing_root.as_deref(), &mut lock)?;
    nothing_waits(&chain)?;
    let layers = Layer::of_chain(chain)?;
    let cannot = || format!("{}: cannot be read", printable(path));
    let end = ImageEnd::of_chain(layers, args.salvage).with_context(cannot)?;
    let lost = end.source.as_ref().map_or(&[][..], |source| &source.lost);
    if !lost.is_empty() {
        let bytes: u64 = lost.iter().map(|range| range.end - range.start).sum();
        let ranges = lost.iter().map(|range| format!("{}..{}", range.start, range.end));
        let text = format!(
            "{}: the end of a file of its chain is missing: {bytes} bytes of the disk are lost, {}",
            printable(path),
            ranges.collect::<Vec<_>>().join(", ")
        );
        if !args.salvage {
            bail!(
                "{text}. With --salvage the rest is copied, and what is lost is zeroes in the copy"
            );
        }
        eprintln!("{text}: zeroes in the copy");
    }
    Ok(End::Image(Box::new(end)))
}
