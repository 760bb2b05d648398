//! SPDK's vhost target with one disk, from its binary.

use crate::bench::image::Device;
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Block size of its disks, in bytes, and blocks of its null disk.
const BLOCK: u64 = 4096;
const NULL_BLOCKS: u64 = (1 << 30) / BLOCK;

/// Writes what it reads when it starts.
///
/// # Errors
/// That it has no such disk, or what the host says to writing.
pub(crate) fn write_config(
    folder: &Path,
    device: Device,
    file: Option<&Path>,
    aio: &str,
) -> Result<PathBuf> {
    let path = folder.join("spdk.json");
    std::fs::write(&path, serde_json::to_vec_pretty(&config(device, file, aio)?)?)?;
    Ok(path)
}

/// One disk, `d`, at `disk.sock` of the folder of sockets.
fn config(device: Device, file: Option<&Path>, aio: &str) -> Result<Value> {
    let disk = match (device, file) {
        (Device::Null, _) => json!({
            "method": "bdev_null_create",
            "params": { "name": "d", "num_blocks": NULL_BLOCKS, "block_size": BLOCK },
        }),
        (_, Some(file)) => json!({
            "method": if aio == "uring" { "bdev_uring_create" } else { "bdev_aio_create" },
            "params": { "name": "d", "filename": file, "block_size": BLOCK },
        }),
        _ => bail!("SPDK has no {}", device.name()),
    };
    let controller = json!({
        "method": "vhost_create_blk_controller",
        "params": { "ctrlr": "disk.sock", "dev_name": "d" },
    });
    Ok(json!({ "subsystems": [
        { "subsystem": "bdev", "config": [disk] },
        { "subsystem": "vhost_blk", "config": [controller] },
    ]}))
}

/// On these cores, without huge pages, with its sockets in `folder`. Without `--no-pci` DPDK tries its
/// drivers on the host's devices.
pub(crate) fn arguments(cores: &[usize], folder: &Path, config: &Path) -> Vec<String> {
    let list: Vec<String> = cores.iter().map(ToString::to_string).collect();
    let text = |path: &Path| path.display().to_string();
    vec![
        "-m".into(),
        format!("[{}]", list.join(",")),
        "-S".into(),
        text(folder),
        "-r".into(),
        text(&folder.join("rpc.sock")),
        "--no-pci".into(),
        "--no-huge".into(),
        "-s".into(),
        "1024".into(),
        "-c".into(),
        text(config),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_its_disk_at_the_same_socket() {
        let null = config(Device::Null, None, "aio").unwrap();
        assert_eq!(null["subsystems"][0]["config"][0]["method"], "bdev_null_create");
        let uring = config(Device::File, Some(Path::new("/a b")), "uring").unwrap();
        let disk = &uring["subsystems"][0]["config"][0];
        assert_eq!(
            (&disk["method"], &disk["params"]["filename"]),
            (&json!("bdev_uring_create"), &json!("/a b"))
        );
        for of in [null, uring] {
            assert_eq!(of["subsystems"][1]["config"][0]["params"]["ctrlr"], "disk.sock");
        }
        assert!(config(Device::SimHdd, None, "aio").is_err());
        let words = arguments(&[0, 2], Path::new("/s"), Path::new("/s/c"));
        assert_eq!(words[..4], ["-m", "[0,2]", "-S", "/s"]);
        assert!(words.contains(&"--no-pci".to_owned()), "{words:?}");
    }
}
