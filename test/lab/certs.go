// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// TLSFiles contains the paths of PEM files. The paths are valid in every process of the
// machine and of the lab while the lab is open.
type TLSFiles struct {
	CA                    string // of the authority that signed the server's certificate
	ClientCert, ClientKey string // empty unless the server requires client certificates

	serverCert, serverKey string
}

func (f TLSFiles) clientConfig() (*tls.Config, error) {
	ca, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, err
	}

	cfg := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	cfg.RootCAs.AppendCertsFromPEM(ca)
	if f.ClientCert == "" {
		return cfg, nil
	}

	cert, err := tls.LoadX509KeyPair(f.ClientCert, f.ClientKey)
	if err != nil {
		return nil, err
	}
	cfg.Certificates = []tls.Certificate{cert}
	return cfg, nil
}

// Authority signs certificates and writes them to the folder dir.
type Authority struct {
	dir, file string // file is the path of the authority's own certificate
	cert      *x509.Certificate
	key       *ecdsa.PrivateKey
}

// NewAuthority creates an authority, and writes its certificate and key to the folder
// dir. It creates the folder if necessary.
func NewAuthority(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}

	a := &Authority{dir: dir}
	var err error
	a.file, _, err = a.Issue("ca", nil)
	return a, err
}

// CA returns the path of the authority's own certificate.
func (a *Authority) CA() string { return a.file }

// writeTLSFiles also returns the configuration of the lab's own clients.
func writeTLSFiles(dir, server string, addrs []netip.Addr, client bool) (f TLSFiles, config *tls.Config, err error) {
	ca, err := NewAuthority(dir)
	if err != nil {
		return f, nil, err
	}

	f.CA = ca.CA()
	if f.serverCert, f.serverKey, err = ca.Issue(server, addrs); err != nil {
		return f, nil, err
	}
	if client {
		if f.ClientCert, f.ClientKey, err = ca.Issue("flannel", nil); err != nil {
			return f, nil, err
		}
	}
	config, err = f.clientConfig()
	return f, config, err
}

// Issue writes a certificate and its key to files, and returns their paths. The
// certificate is valid for a day, for servers at addrs and for clients. The files replace
// those of an earlier certificate with the same name.
func (a *Authority) Issue(name string, addrs []netip.Addr) (certFile, keyFile string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", fmt.Errorf("make key for %s: %w", name, err)
	}

	const validity = 24 * time.Hour
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(validity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}

	for _, addr := range addrs {
		cert.IPAddresses = append(cert.IPAddresses, addr.AsSlice())
	}

	if a.cert == nil { // this is the authority's own certificate
		cert.IsCA = true
		cert.BasicConstraintsValid = true
		cert.KeyUsage = x509.KeyUsageCertSign
		a.cert = cert
		a.key = key
	}

	certDER, err := x509.CreateCertificate(rand.Reader, cert, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return "", "", fmt.Errorf("sign certificate for %s: %w", name, err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", fmt.Errorf("write key for %s: %w", name, err)
	}

	certFile = filepath.Join(a.dir, name+".crt")
	keyFile = filepath.Join(a.dir, name+".key")
	for file, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: certDER},
		keyFile:  {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			return "", "", err
		}
	}
	return certFile, keyFile, nil
}
