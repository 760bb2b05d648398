use super::*;
use crate::create::NewImage;
use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// An image of 1 MiB in a folder, that names `backing`.
fn make(dir: &Path, name: &str, backing: Option<(&str, Format)>) {
    let path = dir.join(name);
    let file = File::create(&path).unwrap();
    let backing = backing.map(|(name, format)| (Path::new(name), format));
    NewImage { virtual_size: 1 << 20, cluster_bits: 16, backing }.write(&file).unwrap();
}

fn top(dir: &Path, name: &str) -> Top {
    let name = dir.join(name);
    Top { file: File::open(&name).unwrap(), name, format: Format::Qcow2, read_only: true }
}

fn open(dir: &Path, name: &str, root: Option<&Path>) -> Result<Chain, ChainError> {
    Chain::open(top(dir, name), root, &mut |_, _, _| Ok(()))
}

/// The words of the refusal.
fn refused(dir: &Path, name: &str, root: Option<&Path>) -> String {
    open(dir, name, root).unwrap_err().to_string()
}

fn folders() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    fs::create_dir(&images).unwrap();
    (dir, images)
}

#[test]
fn a_chain_is_opened_from_the_top_down() {
    let (dir, images) = folders();
    fs::create_dir(images.join("sub")).unwrap();
    fs::write(images.join("base.raw"), [7; 4096]).unwrap();
    make(&images, "sub/middle.qcow2", Some(("../base.raw", Format::Raw)));
    make(&images, "top.qcow2", Some(("sub/middle.qcow2", Format::Qcow2)));
    let mut asked = Vec::new();
    let chain = Chain::open(top(&images, "top.qcow2"), None, &mut |_, name, read_only| {
        asked.push((name.file_name().unwrap().to_owned(), read_only));
        Ok(())
    });
    let chain = chain.unwrap();
    let formats: Vec<_> = chain.files.iter().map(|image| image.format).collect();
    assert_eq!(formats, [Format::Qcow2, Format::Qcow2, Format::Raw]);
    let sizes: Vec<_> = chain.files.iter().map(|image| image.virtual_size).collect();
    assert_eq!(sizes, [1 << 20, 1 << 20, 4096]);
    assert_eq!(asked, [("middle.qcow2".into(), true), ("base.raw".into(), true)]);
    // What is opened waits for the disk like any other file.
    let flags = rustix::fs::fcntl_getfl(&chain.files[2].file).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    // Absolute names lead to the same place, by the folder's own name or by a link to it.
    symlink(&images, dir.path().join("link")).unwrap();
    for folder in ["images", "link"] {
        let name = dir.path().join(folder).join("base.raw");
        make(&images, "absolute.qcow2", Some((name.to_str().unwrap(), Format::Raw)));
        let root = dir.path().join(folder);
        assert_eq!(open(&images, "absolute.qcow2", Some(&root)).unwrap().files.len(), 2);
    }
}

#[test]
fn b24_names_do_not_lead_out_of_the_folder() {
    let (dir, images) = folders();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    symlink(dir.path().join("secret"), images.join("absolute-link")).unwrap();
    symlink("../secret", images.join("link")).unwrap();
    symlink("..", images.join("up")).unwrap();
    let full = dir.path().join("secret");
    let names =
        ["/etc/passwd", "../secret", "link", "absolute-link", "up/secret", full.to_str().unwrap()];
    for name in names.into_iter().chain(["x/../../secret", "/proc/self/fd/0"]) {
        make(&images, "top.qcow2", Some((name, Format::Raw)));
        let words = refused(&images, "top.qcow2", None);
        let missing = name.starts_with("x/") && words.contains("is not there");
        assert!(missing || words.contains("is outside"), "{name}: {words}");
        assert!(words.contains("top.qcow2: its backing file"), "{words}");
        assert!(missing || words.contains("--backing-root"), "{words}");
    }
    // A wider bound is the owner's to give; then relative names lead there, and links within it.
    for name in ["../secret", "link", "up/secret", full.to_str().unwrap()] {
        make(&images, "top.qcow2", Some((name, Format::Raw)));
        assert_eq!(open(&images, "top.qcow2", Some(dir.path())).unwrap().files.len(), 2, "{name}");
    }
    // An image outside of the bound may name one within it.
    make(dir.path(), "outer.qcow2", Some(("images/base", Format::Raw)));
    fs::write(images.join("base"), "base").unwrap();
    assert!(open(dir.path(), "outer.qcow2", Some(&images)).is_ok());
    // Who allows everything says so.
    make(&images, "top.qcow2", Some(("absolute-link", Format::Raw)));
    assert!(open(&images, "top.qcow2", Some(Path::new("/"))).is_ok());
}

#[test]
fn b25_what_is_no_disk_is_not_opened() {
    let (_dir, images) = folders();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        images.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    fs::create_dir(images.join("folder")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(images.join("socket")).unwrap();
    let cases = [("pipe", "a pipe"), ("folder", "a folder"), ("socket", "a socket")];
    for (name, words) in cases {
        make(&images, "top.qcow2", Some((name, Format::Raw)));
        let message = refused(&images, "top.qcow2", None);
        assert!(message.contains(words), "{message}");
    }
    make(&images, "top.qcow2", Some(("/dev/null", Format::Raw)));
    let message = refused(&images, "top.qcow2", Some(Path::new("/dev")));
    assert!(message.contains("a character device"), "{message}");
}

#[test]
fn b26_chains_end() {
    let (_dir, images) = folders();
    // By itself, and by another one.
    make(&images, "self.qcow2", Some(("self.qcow2", Format::Qcow2)));
    make(&images, "a.qcow2", Some(("b.qcow2", Format::Qcow2)));
    make(&images, "b.qcow2", Some(("./a.qcow2", Format::Qcow2)));
    fs::hard_link(images.join("b.qcow2"), images.join("other")).unwrap();
    for name in ["self.qcow2", "a.qcow2", "other"] {
        let message = refused(&images, name, None);
        assert!(message.contains("in this chain already"), "{message}");
    }
    make(&images, "0", None);
    for number in 1..=CHAIN_MAX {
        let below = (number - 1).to_string();
        make(&images, &number.to_string(), Some((&below, Format::Qcow2)));
    }
    let last = CHAIN_MAX - 1;
    assert_eq!(open(&images, &last.to_string(), None).unwrap().files.len(), CHAIN_MAX);
    let message = refused(&images, &CHAIN_MAX.to_string(), None);
    assert!(message.contains("last of 64 images"), "{message}");
}

/// Flattened, and then on top of snapshots.
#[test]
fn f61_a_flattened_clone_on_its_snapshots_needs_no_base() {
    let (_dir, images) = folders();
    fs::write(images.join("base.raw"), [7; 4096]).unwrap();
    fs::write(images.join("other.raw"), [7; 4096]).unwrap();
    make(&images, "alone", None);
    make(&images, "first", Some(("base.raw", Format::Raw)));
    make(&images, "second", Some(("first", Format::Qcow2)));
    make(&images, "clone", Some(("second", Format::Qcow2)));
    make(&images, "of-alone", Some(("alone", Format::Qcow2)));
    make(&images, "of-other", Some(("other.raw", Format::Raw)));
    let base = images.join("base.raw");
    let clone = |name: &str| {
        let base = (&*base, Format::Raw);
        Chain::open_clone(top(&images, name), None, base, &mut |_, _, _| Ok(()))
    };
    let elsewhere = |name: &str| {
        let is_called = |name: &Path| name == Path::new("nbd://h/x");
        let base = Elsewhere { is_called: &is_called, name: Path::new("nbd://h/x"), bytes: 4096 };
        Chain::open_on(top(&images, name), None, &base, &mut |_, _, _| Ok(()))
    };
    assert_eq!(clone("clone").unwrap().files.len(), 4);
    // As it is when it is detached: the format stays where it is.
    let first = File::options().write(true).open(images.join("first")).unwrap();
    first.write_all_at(&[0; 12], 8).unwrap();
    let images_of = |chain: Result<Chain, ChainError>| chain.unwrap().files.len();
    for (name, images) in [("clone", 3), ("second", 2), ("first", 1), ("alone", 1)] {
        assert_eq!((images_of(clone(name)), images_of(elsewhere(name))), (images, images));
    }
    // Those that never were based on it.
    for name in ["of-alone", "of-other"] {
        for error in [clone(name).unwrap_err(), elsewhere(name).unwrap_err()] {
            let error = error.to_string();
            assert!(error.contains(&format!("{name}: it is there already")), "{error}");
        }
    }
    // It would be written beneath what is based on it.
    make(&images, "base.raw", Some(("clone", Format::Qcow2)));
    let base = (&*base, Format::Qcow2);
    let swapped = Chain::open_clone(top(&images, "clone"), None, base, &mut |_, _, _| Ok(()));
    assert!(matches!(swapped, Err(ChainError::Swapped { .. })), "{swapped:?}");
}

#[test]
fn each_fault_names_the_image_that_names_the_file() {
    let (_dir, images) = folders();
    make(&images, "broken", None);
    fs::write(images.join("text"), "no image").unwrap();
    let cases = [
        ("gone.raw", Format::Raw, "its backing file 'gone.raw' is not there"),
        ("nbd://host/disk", Format::Raw, "words for QEMU"),
        ("json:{\"driver\":\"file\"}", Format::Raw, "words for QEMU"),
        ("text", Format::Qcow2, "text: it is no qcow2 image"),
        ("tab\there", Format::Raw, "'tab\\there'"),
    ];
    for (name, format, words) in cases {
        make(&images, "top.qcow2", Some((name, format)));
        let message = refused(&images, "top.qcow2", None);
        assert!(message.contains(words), "{message}");
    }
    // The format as the header has it.
    make(&images, "top.qcow2", Some(("broken", Format::Qcow2)));
    let mut bytes = fs::read(images.join("top.qcow2")).unwrap();
    bytes[120..125].copy_from_slice(b"vmdk\0");
    bytes[116..120].copy_from_slice(&4_u32.to_be_bytes());
    fs::write(images.join("vmdk.qcow2"), &bytes).unwrap();
    let message = refused(&images, "vmdk.qcow2", None);
    assert!(message.contains("format 'vmdk'"), "{message}");
    bytes[112..116].copy_from_slice(&1_u32.to_be_bytes());
    fs::write(images.join("none.qcow2"), &bytes).unwrap();
    let message = refused(&images, "none.qcow2", None);
    assert!(message.contains("never guessed") && message.contains("-F raw"), "{message}");
    // A lock that is somebody else's.
    make(&images, "top.qcow2", Some(("broken", Format::Qcow2)));
    let locked = Chain::open(top(&images, "top.qcow2"), None, &mut |_, _, _| Err("busy".into()));
    assert!(locked.unwrap_err().to_string().contains("is not to be had: busy"));
}

#[test]
fn what_is_written_is_judged_more_strictly() {
    let (_dir, images) = folders();
    make(&images, "base.qcow2", None);
    make(&images, "top.qcow2", Some(("base.qcow2", Format::Qcow2)));
    let dirty = |name: &str| {
        let file = File::options().write(true).open(images.join(name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &1_u64.to_be_bytes(), 72).unwrap();
    };
    let writable = || Top { read_only: false, ..top(&images, "top.qcow2") };
    // What is only read may be dirty.
    dirty("base.qcow2");
    assert!(Chain::open(writable(), None, &mut |_, _, _| Ok(())).is_ok());
    dirty("top.qcow2");
    assert!(open(&images, "top.qcow2", None).is_ok());
    let message = Chain::open(writable(), None, &mut |_, _, _| Ok(())).unwrap_err().to_string();
    assert!(message.contains("qemu-img check -r all"), "{message}");
}
