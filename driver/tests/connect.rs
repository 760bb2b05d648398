//! What is said when there is no server, or one that does not answer.

use ringway_driver::{Device, Error, Options};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

#[test]
fn a_path_without_a_server_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("missing");
    let error = Device::connect(&path).unwrap_err().to_string();
    let start = format!("start `ringway serve IMAGE --socket {}`", path.display());
    assert_eq!(error, format!("there is no socket at {}: {start}", path.display()));

    drop(UnixListener::bind(&path).unwrap());
    let error = Device::connect(&path).unwrap_err().to_string();
    assert!(error.contains("its server has ended") && error.ends_with(&start), "{error}");

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    assert!(matches!(Device::connect(&path), Err(Error::NotASocket { .. })));
}

#[test]
fn a_silent_server_costs_the_timeout_and_no_more() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let options = Options::new().timeout(Duration::from_millis(100));
    let error = options.over(ours).unwrap_err();
    assert!(matches!(error, Error::Silent { during: "GET_FEATURES", .. }), "{error}");
    drop(theirs);
}

#[test]
fn a_server_that_hangs_up_is_named() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = Options::new().over(ours).unwrap_err();
    assert!(matches!(error, Error::Disconnected { during: "GET_FEATURES" }), "{error}");
}

#[test]
fn options_that_cannot_be_are_refused() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = Options::new().queue_size(100).over(ours).unwrap_err();
    assert_eq!(error.to_string(), "queue size 100 is not a power of two from 4 to 32768");
}
