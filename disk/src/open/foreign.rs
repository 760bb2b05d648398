//! Image formats other than raw.

/// What an image that is not raw begins or ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignFormat {
    /// QEMU copy-on-write, version 1.
    Qcow,
    /// QEMU copy-on-write, versions 2 and 3.
    Qcow2,
    /// QEMU enhanced disk.
    Qed,
    /// VMware virtual disk: sparse extents of either kind, or a descriptor.
    Vmdk,
    /// Hyper-V virtual hard disk.
    Vhdx,
    /// Virtual PC virtual hard disk.
    Vhd,
    /// `VirtualBox` disk image.
    Vdi,
    /// Parallels disk image.
    Parallels,
    /// Bochs disk image.
    Bochs,
    /// Apple disk image.
    Dmg,
    /// Encrypted with LUKS, version 1 or 2.
    Luks,
}

impl ForeignFormat {
    /// As `qemu-img` calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qcow => "qcow",
            Self::Qcow2 => "qcow2",
            Self::Qed => "qed",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vhd => "vpc",
            Self::Vdi => "vdi",
            Self::Parallels => "parallels",
            Self::Bochs => "bochs",
            Self::Dmg => "dmg",
            Self::Luks => "luks",
        }
    }

    /// As people call it.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Qcow => "a qcow image",
            Self::Qcow2 => "a qcow2 image",
            Self::Qed => "a QED image",
            Self::Vmdk => "a VMDK image",
            Self::Vhdx => "a VHDX image",
            Self::Vhd => "a VHD image",
            Self::Vdi => "a VDI image",
            Self::Parallels => "a Parallels image",
            Self::Bochs => "a Bochs image",
            Self::Dmg => "a DMG image",
            Self::Luks => "a disk encrypted with LUKS",
        }
    }
}
