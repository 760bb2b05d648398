//! Disks that are clones: what they are called.

use super::DiskArgs;
use super::disk::Format;
use super::source::{base_source, is_unreal};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

impl DiskArgs {
    /// Takes the image that was named: with `overlay` that may be the base.
    pub fn take_image(&mut self) -> Option<PathBuf> {
        let overlay = self.overlay.is_some();
        self.image.take().or_else(|| if overlay { self.base.take() } else { None })
    }

    /// Has all words say the same of a clone, and gives its path: that of the image, if it is none.
    ///
    /// # Errors
    /// Words that do not go together.
    pub(super) fn settle_clone(
        &mut self,
        image: &Path,
        socket: Option<&Path>,
    ) -> Result<PathBuf, String> {
        let mut image = image.to_owned();
        if let Some(folder) = &self.overlay {
            let name = socket.and_then(Path::file_stem).ok_or(
                "overlay names the clone as the socket, and there is none with a path: name both \
                 image and base instead",
            )?;
            let mut name = OsString::from(name);
            name.push(".qcow2");
            let clone = folder.join(name);
            // A process of its own is told all of it.
            if self.base.is_none() {
                self.base = Some(std::mem::replace(&mut image, clone));
            } else if image != clone {
                return Err(
                    "overlay serves a clone of the image, and base says what the image is a \
                            clone of: leave one of them out"
                        .into(),
                );
            }
        }
        if self.cache_base && self.base.is_none() && self.format != Some(Format::Qcow2) {
            let why = "cache-base is said of what an image is based on, and a raw one is based on nothing: add \
                       base, or format = \"qcow2\"";
            return Err(why.into());
        }
        let Some(base) = &self.base else {
            return match (self.ephemeral, self.base_format) {
                (true, _) => {
                    Err("ephemeral deletes clones, and this disk is none: add base".into())
                }
                (_, Some(_)) => Err("base-format is said of a base: add base".into()),
                _ => Ok(image),
            };
        };
        base_source(base, self.base_format == Some(Format::Qcow2))?;
        if is_unreal(&image) {
            return Err(format!("{} is no file: a clone is one", image.display()));
        }
        if self.format == Some(Format::Raw) {
            return Err("a clone is a qcow2 image: leave format = \"raw\" out".into());
        }
        if self.read_only {
            return Err("a clone that nobody writes is its base: serve that read-only".into());
        }
        self.format = Some(Format::Qcow2);
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DiskSpec, Place};
    use super::*;

    fn spec(words: &str) -> Result<DiskSpec, String> {
        let mut disk: DiskArgs = toml::from_str(words).unwrap();
        let image = disk.take_image().expect("an image");
        disk.into_spec(&image, Place::Socket("/run/vm7.sock".into()))
    }

    #[test]
    fn a_clone_is_called_as_its_image_or_as_its_socket() {
        let clone = |words| {
            let spec = spec(words).unwrap();
            assert!(spec.qcow2 && !spec.raw);
            // What a process of its own is told says the same.
            let mut words = *spec.words;
            let image = words.take_image().unwrap();
            let again = words.into_spec(&image, Place::Socket("/run/vm7.sock".into())).unwrap();
            assert_eq!((&again.base, &again.named_after), (&spec.base, &spec.named_after));
            (again.words.image.unwrap(), spec.base.unwrap().0, spec.named_after.is_some())
        };
        let found: (PathBuf, PathBuf, bool) = ("/c/vm7.qcow2".into(), "/b.raw".into(), true);
        assert_eq!(clone("image = '/b.raw'\noverlay = '/c'"), found);
        assert_eq!(clone("base = '/b.raw'\noverlay = '/c'"), found);
        let found = ("/c/vm7.qcow2".into(), "/b.raw".into(), false);
        assert_eq!(clone("image = '/c/vm7.qcow2'\nbase = '/b.raw'"), found);
        let found = ("/c/one".into(), "/b.raw".into(), false);
        assert_eq!(clone("image = '/c/one'\nbase = '/b.raw'\nephemeral = true"), found);
    }

    #[test]
    fn words_that_do_not_go_together_are_refused() {
        for (words, why) in [
            ("image = 'a'\nbase = 'b'\noverlay = 'c'", "leave one of them out"),
            ("image = 'a'\nephemeral = true", "add base"),
            ("image = 'a'\nbase-format = 'raw'", "add base"),
            ("image = 'a'\ncache-base = true", "add base"),
            ("image = 'a'\nformat = 'raw'\ncache-base = true", "add base"),
            ("image = 'a'\nbase = 'b'\nformat = 'raw'", "leave format"),
            ("image = 'a'\nbase = 'b'\nread-only = true", "read-only"),
            ("image = 'a'\nbase = 'null:1G'", "is no file"),
        ] {
            let error = spec(words).unwrap_err();
            assert!(error.contains(why), "{words}: {error}");
        }
    }
}
