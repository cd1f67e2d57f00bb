// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	spec "github.com/opencontainers/image-spec/specs-go/v1"
)

// writeImage writes an OCI archive with one image for each folder. A single image is the
// only entry of the archive. Several images are in an index, from which container runtimes
// choose the image for their platform.
func writeImage(args []string) (err error) {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	imageName := flags.String("name", "", "full name and tag of the image")
	out := flags.String("out", "", "archive to write")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if _, err := name.NewTag(*imageName, name.StrictValidation); err != nil {
		return fmt.Errorf("read -name: %w", err)
	}
	if *out == "" || flags.NArg() == 0 {
		return errors.New("usage: release image -name NAME:TAG -out ARCHIVE ARCH=FOLDER ARCH=FOLDER")
	}
	when, err := sourceDate()
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()

	files := filepath.Join(work, "oci")
	oci, err := layout.Write(files, empty.Index)
	if err != nil {
		return err
	}
	var images []spec.Descriptor
	for _, arg := range flags.Args() {
		arch, folder, found := strings.Cut(arg, "=")
		if !found {
			return fmt.Errorf("argument is %q: want ARCH=FOLDER", arg)
		}
		image, err := addImage(oci, platform(arch), folder, filepath.Join(work, arch+".tar"), when)
		if err != nil {
			return fmt.Errorf("build image for %s: %w", arch, err)
		}
		images = append(images, image)
	}
	top := images[0]
	if len(images) > 1 {
		if top, err = addIndex(oci, images); err != nil {
			return fmt.Errorf("write the index of all images: %w", err)
		}
	}
	hash, err := v1.NewHash(top.Digest.String())
	if err != nil {
		return err
	}
	err = oci.AppendDescriptor(v1.Descriptor{
		MediaType: types.MediaType(top.MediaType), Digest: hash, Size: top.Size,
		Annotations: map[string]string{spec.AnnotationRefName: *imageName},
	})
	if err != nil {
		return err
	}
	return writeTar(*out, files, when)
}

func addImage(oci layout.Path, p spec.Platform, folder, layerFile string, when time.Time) (spec.Descriptor, error) {
	image, err := newImage(p, folder, layerFile, when)
	if err != nil {
		return spec.Descriptor{}, err
	}
	if err := oci.WriteImage(image); err != nil {
		return spec.Descriptor{}, err
	}
	manifest, err := image.RawManifest()
	if err != nil {
		return spec.Descriptor{}, err
	}
	return spec.Descriptor{
		MediaType: spec.MediaTypeImageManifest, Digest: digest.FromBytes(manifest), Size: int64(len(manifest)), Platform: &p,
	}, nil
}

// addIndex adds an index of images to the layout oci, and returns its descriptor. It uses
// the types of the OCI specification. A tool that pushes an image decodes the index and
// encodes it again with them: with another order of fields the digest would change.
func addIndex(oci layout.Path, images []spec.Descriptor) (spec.Descriptor, error) {
	index := spec.Index{MediaType: spec.MediaTypeImageIndex, Manifests: images}
	index.SchemaVersion = 2
	text, err := json.Marshal(index)
	if err != nil {
		return spec.Descriptor{}, err
	}
	d := spec.Descriptor{MediaType: index.MediaType, Digest: digest.FromBytes(text), Size: int64(len(text))}
	hash, err := v1.NewHash(d.Digest.String())
	if err != nil {
		return spec.Descriptor{}, err
	}
	return d, oci.WriteBlob(hash, io.NopCloser(bytes.NewReader(text)))
}

func platform(arch string) spec.Platform {
	p := spec.Platform{OS: "linux", Architecture: arch}
	if arch == "arm" {
		p.Variant = "v7" // the value of GOARM in the Makefile
	}
	return p
}

// newImage returns an image with one layer, which contains the files of a folder. It writes
// the layer to a file, which must exist as long as the image is used.
func newImage(p spec.Platform, folder, layerFile string, when time.Time) (v1.Image, error) {
	if err := writeTar(layerFile, folder, when); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromFile(layerFile, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	created := v1.Time{Time: when}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		OS: p.OS, Architecture: p.Architecture, Variant: p.Variant, Created: created,
		RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Entrypoint: []string{"/opt/bin/flanneld"},
			Env:        []string{"PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, mutate.Addendum{Layer: layer, History: v1.History{Created: created, CreatedBy: "make image"}})
}

// writeTar writes the files of a folder as a tar archive, in the order of their names. All
// belong to root and have the same time. Their modes depend only on whether they are
// executable, so that the umask of the build does not matter.
func writeTar(archive, folder string, when time.Time) (err error) {
	out, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == folder {
			return err
		}
		return addFile(w, folder, path, d, when)
	})
	return errors.Join(err, w.Close())
}

func addFile(w *tar.Writer, folder, path string, d fs.DirEntry, when time.Time) error {
	name, err := filepath.Rel(folder, path)
	if err != nil {
		return err
	}
	info, err := d.Info()
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: 0o755, ModTime: when, Format: tar.FormatPAX}
	switch {
	case d.IsDir():
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case d.Type() == fs.ModeSymlink:
		h.Typeflag, h.Mode = tar.TypeSymlink, 0o777
		if h.Linkname, err = os.Readlink(path); err != nil {
			return err
		}
	case d.Type().IsRegular():
		h.Typeflag, h.Size = tar.TypeReg, info.Size()
		if info.Mode()&0o100 == 0 {
			h.Mode = 0o644
		}
	default:
		return fmt.Errorf("add %s: type is %s, want a folder, link or regular file", name, d.Type())
	}
	if err := w.WriteHeader(h); err != nil || h.Typeflag != tar.TypeReg {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

func sourceDate() (time.Time, error) {
	const variable = "SOURCE_DATE_EPOCH"
	seconds, err := strconv.ParseInt(os.Getenv(variable), 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("read %s: %w", variable, err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}
